"""Ranks that save sharded state to two tiers. Usage: tier_ranks.py DIRECTORY ENVIRONMENT ADDRESS RANKS

Writes what each rank saw to DIRECTORY/rank<k>.json. The other ranks are forked before any store is opened.
"""

import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
)
from dist_env import StaticDistributedEnvironment, open_object_store


class Job:
    """What one rank has: a part of a model, and a manager of two tiers."""

    def __init__(self, rank: int, ranks: int, run: Path, address: str, **options: object) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 71))
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        self.manager = CheckpointManager(
            CheckpointConfig(run, remote_dir=address, timeout_seconds=30, **options),  # type: ignore[arg-type]
            dist=StaticDistributedEnvironment(
                rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks, backend="gloo"
            ),
            stateful_provider=[
                StateComponent(
                    key="model", stateful=ModelState(self.model), sharing_pattern=SharingPattern.SHARDED
                )
            ],
        )

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def save(self, step: int) -> None:
        self.fill(step)
        self.manager.save_checkpoint(step)

    def value(self) -> float:
        tensors = [parameter.to_local() for parameter in self.model.parameters()]  # type: ignore[attr-defined]
        (found,) = {value for each in tensors for value in (float(each.min()), float(each.max()))}
        return found

    def load(self) -> list[object]:
        self.fill(-1)
        loaded = self.manager.load_checkpoint()
        assert loaded is not None
        return [str(loaded.path), self.value()]


def message(action) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def run(rank: int, ranks: int, directory: Path, environment: dict[str, str], address: str) -> None:
    os.environ.update(environment)
    store = dist.FileStore(str(directory / "store"), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=timedelta(seconds=60))
    fast, seen = directory / "fast" / "run", {}

    job = Job(rank, ranks, fast, address)
    for step in (1, 2):
        job.save(step)
    job.manager.wait_for_upload()
    job.manager.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(fast)
    dist.barrier()
    # A host that was replaced.
    job = Job(rank, ranks, fast, address, async_save=True)
    seen["wiped"] = job.load()
    job.save(3)
    job.manager.close()
    dist.barrier()
    job = Job(rank, ranks, fast, address)
    seen["local"] = job.load()

    other = Job(rank, ranks, directory / "other", address)
    seen["refused"] = message(lambda: other.save(1))
    other.manager.close()

    # The store cannot be reached any more: rank 0 uploads, and all learn of it.
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    open_object_store.cache_clear()
    job.save(4)
    seen["down"] = message(job.manager.wait_for_upload)
    os.environ.update(environment)
    open_object_store.cache_clear()
    job.manager.wait_for_upload()
    job.fill(-1)
    seen["saved while down"] = job.load()[1]
    job.manager.close()
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main() -> None:
    directory, environment, address, ranks = Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    children = []
    for rank in range(1, int(ranks)):
        child = os.fork()
        if child == 0:
            run(rank, int(ranks), directory, environment, address)
            os._exit(0)
        children.append(child)
    run(0, int(ranks), directory, environment, address)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
