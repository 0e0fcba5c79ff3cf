"""Gradients that travel in 16 bits."""

from __future__ import annotations

from pathlib import Path

import torch
from model import Job, batches, difference, mean, own_gradients, same_on_both, shard

from trainer_ddp import CompressionArguments


def rounding(directory: Path) -> object:
    """Averages beside DDP's own, and bytes."""
    batch = shard(next(batches(1)))
    exact = Job(CompressionArguments()).gradients(batch)
    found: dict[str, object] = {}
    for method in ("fp16", "bf16"):
        job = Job(CompressionArguments(method=method))
        rounded = [job.gradients(batch) for _ in range(3)]
        found[method] = {
            "difference": max(difference(each, exact) for each in rounded),
            "unrounded": max(difference(each, exact) for each in rounded) == 0,
            "bytes": job.traffic.bytes,
            "same": all(same_on_both(each) for each in rounded),
            "state": job.active.state_dict(),
            "components": len(job.active.state_components()),
        }
    own = mean(own_gradients(Job(CompressionArguments()).model, batch))
    found["DDP beside the mean"] = difference(exact, own)
    found["elements"] = sum(each.numel() for each in exact.values())
    return found


def rounding_of_some(directory: Path) -> object:
    """A model of which a part has 16 bits already: that part travels as it is."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8))
    found: dict[str, object] = {}

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.parts[0](inputs.bfloat16()).float())

    job = Job(CompressionArguments(method="fp16"), model=Mixed())
    gradients = job.gradients(shard(next(batches(1))).flatten()[:64].view(8, 8))
    found["bytes"] = job.traffic.bytes
    found["finite"] = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    found["same"] = same_on_both(gradients)
    return found


ROUNDING = [rounding, rounding_of_some]
