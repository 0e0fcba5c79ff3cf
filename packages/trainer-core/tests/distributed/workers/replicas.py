"""Two replicas of which one, both or none has used a parameter: what gradient each has afterwards."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trainer_core.distributed.transforms import ReplicaGradSync

FOLDER, RANK, WORLD = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    store = dist.FileStore(str(FOLDER / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=60))
    names = ("both", "first", "none", "zeros", "frozen", "short")
    part = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in names})
    part["short"] = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    part["frozen"].requires_grad_(False)
    part["zeros"].grad = torch.zeros(3)  # used, and nothing depends on it
    part["both"].grad = torch.full((3,), RANK + 1.0)
    if RANK == 0:
        part["first"].grad = torch.full((3,), 5.0)
    sync, found = ReplicaGradSync(dist.group.WORLD), []
    for _ in range(2):
        sync.after_backward(part, last=False)
        sync.after_backward(part, last=True)
        sync.finish()
        found.append({name: None if p.grad is None else p.grad.tolist() for name, p in part.items()})
        part["both"].grad = None  # in the next step
    (FOLDER / f"notes-{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
