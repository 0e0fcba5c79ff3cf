"""Two ranks that save sharded state to a store, of which rank 1 cannot upload at one of the steps.

Usage: store_ranks.py DIRECTORY SETTINGS, a JSON object: ``address``; ``good``, the environment of both; and
``bad``, that of rank 1 at step 2, or null to save there more than the bucket has room for; and ``counted``,
an address of the server for each rank, by which it loads. Writes what each rank saw to
DIRECTORY/rank<k>.json. The second rank is forked, before any store is opened.
"""

import json
import os
import sys
import time
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
from checkpoint_core.manifest import verify_checkpoint
from checkpoint_core.store_path import locate
from dist_env import StaticDistributedEnvironment, open_object_store


class Own:
    """State of a rank, of any size."""

    def __init__(self) -> None:
        self.values = torch.zeros(4)

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert isinstance(state["values"], torch.Tensor)
        self.values = state["values"]


class Job:
    """What one rank has."""

    def __init__(self, rank: int, address: str, *, asynchronous: bool) -> None:
        torch.manual_seed(3)
        # Two files of some MB: several windows and parts.
        self.model = nn.Sequential(nn.Linear(1500, 2000), nn.Linear(2000, 1501))
        mesh = init_device_mesh("cpu", (2,))
        self.more = nn.Linear(30, 31)
        for layer in [*self.model, self.more]:
            fully_shard(layer, mesh=mesh)
        self.own = Own()
        self.copy = nn.Linear(7, 7)
        components = [
            ("model", ModelState(self.model), SharingPattern.SHARDED),
            ("more", ModelState(self.more), SharingPattern.SHARDED),
            ("copy", ModelState(self.copy), SharingPattern.REPLICATED),
            ("own", self.own, SharingPattern.PER_RANK),
        ]
        self.manager = CheckpointManager(
            CheckpointConfig(address, timeout_seconds=30, async_save=asynchronous, save_total_limit=None),
            dist=StaticDistributedEnvironment(
                rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
            ),
            stateful_provider=[
                StateComponent(key=key, stateful=stateful, sharing_pattern=pattern, required=True)
                # Ranks may declare them in another order.
                for key, stateful, pattern in (components if rank == 0 else reversed(components))
            ],
        )

    def fill(self, value: float) -> None:
        with torch.no_grad():
            parts = (self.model, self.more, self.copy)
            for parameter in (each for part in parts for each in part.parameters()):
                parameter.fill_(value)
        self.own.values.fill_(value)

    def values(self) -> list[float]:
        sharded = [*self.model.parameters(), *self.more.parameters()]
        tensors = [parameter.to_local() for parameter in sharded]  # type: ignore[attr-defined]
        tensors += [*self.copy.parameters(), self.own.values]
        return sorted({value for each in tensors for value in (float(each.min()), float(each.max()))})

    def save(self, step: int) -> dict[str, object]:
        self.fill(step)
        began, message = time.monotonic(), None
        try:
            self.manager.save_checkpoint(step)
            self.manager.wait()
        except CheckpointError as error:
            message = str(error)
        return {"message": message, "seconds": time.monotonic() - began}


def use(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    open_object_store.cache_clear()


def run(rank: int, directory: Path, settings: dict) -> None:
    use(settings["good"])
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    run, seen = locate(settings["address"]), {}
    job = Job(rank, settings["address"], asynchronous=settings["asynchronous"])
    seen["first"] = job.save(1)
    before = sorted(str(path) for path in run.rglob("*"))
    if rank == 1 and settings["bad"] is None:
        job.own.values = torch.zeros(settings["too_much"], dtype=torch.uint8)
    elif rank == 1:
        use(settings["bad"])
    seen["failing"] = job.save(2)
    use(settings["good"])
    dist.barrier()
    seen["untouched"] = sorted(str(path) for path in run.rglob("*")) == before
    dist.barrier()
    job.own.values = torch.zeros(4)
    if settings["bad"] is not None:
        seen["good again"] = job.save(3)
    job.fill(-1)
    # Reads of the manager are counted there, for each rank by itself.
    use({"AWS_ENDPOINT_URL": settings["counted"][rank]})
    seen["loaded"] = job.manager.load_checkpoint().step
    seen["values"] = job.values()
    use(settings["good"])
    job.manager.close()
    newest = run / f"checkpoint-{seen['loaded']}"
    seen["whole"] = verify_checkpoint(newest, checksums=True).step
    seen["files"] = sorted(path.name for path in newest.rglob("*"))
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main() -> None:
    directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    child = os.fork()
    run(0 if child else 1, directory, settings)
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"rank 1 ended with status {status}")


if __name__ == "__main__":
    main()
