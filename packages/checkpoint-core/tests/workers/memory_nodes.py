"""Two nodes of one rank each, whose memory the second one runs out of after the first save."""

import functools
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_core import CheckpointConfig, CheckpointError, CheckpointManager, memory_tier
from dist_env import StaticDistributedEnvironment

ROOMY, SHORT = "MemAvailable: 9999999 kB\n", "MemAvailable: 0 kB\n"


def work(rank: int, directory: Path, memory: Path) -> None:
    """Save at steps of which some do not fit on rank 1, and note what came of each."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2
    )
    kernel, own = directory / f"kernel{rank}", memory / f"node{rank}"
    own.mkdir()
    (kernel / "proc").mkdir(parents=True)
    memory_tier.make_room = functools.partial(memory_tier.make_room, root=kernel)  # type: ignore[misc]
    logging.basicConfig(filename=directory / f"log{rank}")
    env = StaticDistributedEnvironment(rank=rank, world_size=2, local_rank=0, local_world_size=1)
    config = CheckpointConfig(directory / "run", memory_dir=own, timeout_seconds=60)
    seen: list[object] = []
    with CheckpointManager(config, {"model": torch.nn.Linear(4, 4)}, dist=env) as manager:
        for step, room in enumerate([SHORT, ROOMY, SHORT, SHORT, ROOMY], start=1):
            (kernel / "proc/meminfo").write_text(room if rank else ROOMY)
            try:
                saved = manager.save_to_memory(step)
                seen.append(saved and saved.name)
            except CheckpointError as error:
                seen.append(str(error))
    there = sorted(path.name for path in own.iterdir())
    (directory / f"seen{rank}").write_text(json.dumps({"seen": seen, "there": there}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    work(0 if child else 1, Path(sys.argv[1]), Path(sys.argv[2]))
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
