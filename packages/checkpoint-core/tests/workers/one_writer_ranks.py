"""Two ranks on hosts of their own, of which rank 1 has no room for its file at step 2.

Usage: one_writer_ranks.py DIRECTORY. Writes what each rank saw to DIRECTORY/rank<k>.json.
"""

import json
import os
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint_core import CheckpointConfig, CheckpointError, CheckpointManager
from dist_env import StaticDistributedEnvironment

TOO_SMALL = 1_000_000
"""Bytes: less than a file of weights, and more than what the ranks exchange to find one another."""


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> list[float]:
    tensors = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return sorted({float(value) for tensor in tensors for value in (tensor.min(), tensor.max())})


def run(rank: int, directory: Path, *, asynchronous: bool) -> dict[str, object]:
    model, seen = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 601)), {}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    env = StaticDistributedEnvironment(rank=rank, world_size=2, local_world_size=1, backend="gloo")
    config = CheckpointConfig(
        directory, timeout_seconds=30, async_save=asynchronous, max_shard_size=1_500_000
    )
    manager = CheckpointManager(config, {"model": model}, dist=env)

    def save(step: int) -> str | None:
        fill(model, step)
        try:
            manager.save(step)
            fill(model, -1)  # The copy is what is saved.
            manager.wait()
        except CheckpointError as error:
            return str(error)
        return None

    seen["first"] = save(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_SMALL, hard))
    seen["failing"] = save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    seen["left"] = sorted(path.name for path in directory.iterdir())
    dist.barrier()
    loaded = manager.load()
    seen["loaded"] = [None if loaded is None else loaded.step, values(model)]
    seen["again"] = save(2)
    loaded = manager.load()
    seen["loaded again"] = [None if loaded is None else loaded.step, values(model)]
    manager.close()
    return seen


def rank_main(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    seen = [run(rank, directory / f"run{number}", asynchronous=number == 1) for number in range(2)]
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    rank_main(0 if child else 1, directory)
    if child and os.waitpid(child, 0)[1]:
        raise SystemExit("rank 1 failed")


if __name__ == "__main__":
    main()
