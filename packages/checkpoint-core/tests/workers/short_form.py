"""Two ranks give a manager their objects, not how they share them. Usage: short_form.py DIRECTORY."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoint_core import CheckpointManager, RNGState


class Loader:
    """A position of its own on each rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Any:
        return iter(range(self.position, 10))

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.position = int(str(state["position"]))


class Count(Loader):
    __iter__ = None  # type: ignore[assignment]


def objects(seed: int, sharded: bool, position: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(position),
        "rng": RNGState(),
    }


def values(state: dict[str, Any]) -> list[Any]:
    tensors = list(state["model"].parameters())
    tensors += [each["exp_avg"] for each in state["optimizer"].state.values()]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    rate = state["optimizer"].param_groups[0]["lr"]
    return [[t.tolist() for t in whole], rate, state["scheduler"].last_epoch, state["loader"].position]


def error_of(directory: Path, state: dict[str, Any]) -> str:
    try:
        with CheckpointManager(directory, state) as manager:
            manager.save(1)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def rank_main(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    seen: dict[str, Any] = {}
    for name, sharded in (("copies", False), ("shards", True)):
        first, second = objects(0, sharded, 3 + rank), objects(1, sharded, 0)
        with CheckpointManager(directory / name, first) as manager:
            manager.save(4)
        with CheckpointManager(str(directory / name), second) as manager:
            seen[f"{name}, step"] = manager.load().step
        seen[name] = [values(first), values(second)]
    with CheckpointManager(directory / "copies", objects(1, True, 0)) as manager:
        seen["copies into shards"] = manager.load().step
    # The stage of a pipeline, given as if it were all of the model.
    seen["stage"] = error_of(directory / "stage", {"model": nn.Linear(2, 2 + rank)})
    seen["count"] = error_of(directory / "count", {"count": Count(1)})
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    child = os.fork()
    rank_main(0 if child else 1, Path(sys.argv[1]))
    if child and os.waitpid(child, 0)[1]:
        raise SystemExit("rank 1 has failed")
