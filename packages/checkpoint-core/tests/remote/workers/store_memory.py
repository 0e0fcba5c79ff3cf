"""How much memory two ranks need to save and to resume a sharded model.

Usage: store_memory.py DIRECTORY ENVIRONMENT ADDRESS. Each rank is a process of its own for each of the two,
and writes its figures to DIRECTORY/<action><rank>.json.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from checkpoint_core import CheckpointConfig, CheckpointManager
from dist_env import StaticDistributedEnvironment

LAYERS, WIDTH = 4, 5000
"""100 MB each; one matrix in columns, so that ranges of it lie apart."""


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def run(rank: int, directory: Path, address: str, action: str) -> None:
    store = dist.FileStore(str(directory / f"store {action}"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    for number, layer in enumerate(model):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _, dim=int(number == 0): Shard(dim))
    model.to_empty(device="cpu")
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    if action == "save":
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(number + 1)
    # A first exchange and the library itself are not part of what is measured.
    environment = StaticDistributedEnvironment(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
    )
    manager = CheckpointManager(
        CheckpointConfig(address, timeout_seconds=120), {"model": model}, dist=environment
    )
    import obstore  # noqa: F401

    before = peak_bytes()
    if action == "save":
        manager.save_checkpoint(1)
    else:
        manager.load_checkpoint()
    used = peak_bytes() - before
    values = [sorted({float(p.to_local().min()), float(p.to_local().max())}) for p in model.parameters()]  # type: ignore[attr-defined]
    manager.close()
    (directory / f"{action}{rank}.json").write_text(
        json.dumps({"shard": shard, "used": used, "values": values})
    )
    dist.destroy_process_group()


def main() -> None:
    directory, environment, address = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    os.environ.update(environment)
    torch.set_num_threads(1)
    for action in ("save", "load"):
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run(rank, directory, address, action)
                return
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a rank failed to {action}")


if __name__ == "__main__":
    main()
