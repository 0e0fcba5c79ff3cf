"""Two ranks compress gradients. Usage: two_ranks.py DIRECTORY. Each writes DIRECTORY/rank<k>.json.

The ranks are forked from one process, before any process group exists, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from scenarios_resume import RESUME
from scenarios_rounding import ROUNDING
from scenarios_steps import STEPS

WORLD = 2


def run_rank(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, store=store, timeout=timedelta(seconds=60))
    scenarios: list[Callable[[Path], object]] = [*ROUNDING, *STEPS, *RESUME]
    notes = {scenario.__name__: scenario(directory) for scenario in scenarios}
    (directory / f"rank{rank}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    # The first optimizer of a process imports the compiler, which takes seconds: once for both ranks.
    torch.optim.AdamW([torch.zeros(1)])
    child = os.fork()
    run_rank(0 if child else 1, directory)
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank 1 ended with status {status}")


if __name__ == "__main__":
    main()
