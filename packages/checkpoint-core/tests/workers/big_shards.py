"""A model of 128 MB on two ranks: what a save, an export and a load cost each of them.

Usage: big_shards.py DIRECTORY. Prints one JSON list, an object for each rank.
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

from checkpoint_core import CheckpointConfig, CheckpointManager, ModelState, SharingPattern, StateComponent
from dist_env import StaticDistributedEnvironment

LAYERS = 8
WIDTH = 2048


def model() -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


class Peak:
    """The most memory that was in use during a block, beyond what was in use before."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = status("VmHWM") - self.before


def measure(rank: int, directory: Path) -> dict[str, object]:
    torch.manual_seed(0)
    source = model()
    environment = StaticDistributedEnvironment(
        rank=rank, local_rank=rank, world_size=2, local_world_size=2, backend="gloo"
    )

    def manager(layers: nn.Module) -> CheckpointManager:
        component = StateComponent(
            key="model", stateful=ModelState(layers), sharing_pattern=SharingPattern.SHARDED
        )
        config = CheckpointConfig(output_dir=directory / "run", timeout_seconds=60)
        return CheckpointManager(config, dist=environment, stateful_provider=[component])

    with manager(source) as saving:
        saving.save_checkpoint(0)  # What is imported and allocated at the first call is not the save's.
        with Peak() as save:
            saving.save_checkpoint(1)
        with Peak() as export:
            saving.save_model(directory / "exported")
    torch.manual_seed(1)
    target = model()
    with manager(target) as loading:
        before = bytes_read()
        with Peak() as load:
            loaded = loading.load_checkpoint()
        total = bytes_read() - before
    pairs = zip(source.parameters(), target.parameters(), strict=True)
    return {
        "save": save.extra,
        "export": export.extra,
        "load": load.extra,
        "counted": 0 if loaded is None else loaded.bytes_read,
        "by the system": total,
        "equal": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),
    }


def run(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=90))
    (directory / f"rank{rank}.json").write_text(json.dumps(measure(rank, directory)))
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    run(0 if child else 1, directory)
    if child:
        _, ended = os.waitpid(child, 0)
        if ended:
            raise SystemExit(f"rank 1 ended with status {ended}")
        print(json.dumps([json.loads((directory / f"rank{rank}.json").read_text()) for rank in (0, 1)]))


if __name__ == "__main__":
    main()
