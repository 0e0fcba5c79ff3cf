"""Each rank steps its parts of matrices by `optim="muon"`, and whole ones by torch's Muon, and compares."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Muon

from trainer_core import TrainingArguments
from trainer_core.optimization.muon import build_muon

FOLDER, RANK, WORLD = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 10
PLACES = {(8, 6): 0, (5, 7): 0, (1, 9): 0, (2, 3): 0, (4, 4): 0, (6, 5): 1, (3, 3): None}
"""By which dimension each matrix is sharded; None: whole on every rank."""


def main() -> None:
    """Make the steps, and note for each matrix whether this rank has what one process has."""
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    generator = torch.Generator().manual_seed(0)
    begin = [torch.randn(shape, generator=generator) for shape in PLACES]
    whole = [nn.Parameter(value.clone()) for value in begin]

    def placed(value: torch.Tensor, dim: int | None) -> torch.Tensor:
        return (
            value.clone() if dim is None else distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
        )

    parts = [nn.Parameter(placed(value, dim)) for value, dim in zip(begin, PLACES.values(), strict=True)]
    args = TrainingArguments(optim="muon", learning_rate=0.1, weight_decay=0.1)
    sharded = build_muon(args, [{"params": [(str(number), part) for number, part in enumerate(parts)]}])
    alone = Muon(whole, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(STEPS):
        for number, (one, part, dim) in enumerate(zip(whole, parts, PLACES.values(), strict=True)):
            unused = number == step % 5  # so that rounds are of other matrices
            one.grad = None if unused else torch.randn(one.shape, generator=generator)
            part.grad = None if one.grad is None else placed(one.grad, dim)
        sharded.step()
        alone.step()
    held = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    state = [sharded.state[part]["momentum_buffer"] for part in parts]
    notes = {
        "same": [torch.equal(one, part) for one, part in zip(whole, held, strict=True)],
        "moved": [not torch.equal(one, value) for one, value in zip(whole, begin, strict=True)],
        "sharded state": [isinstance(each, DTensor) for each in state],
    }
    (FOLDER / f"notes-{RANK}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
