"""Each rank fills a model shard by shard in every layout, and compares it with one that had values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_core.model import fill_parameters

FOLDER, RANK, WORLD = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(nn.Module):
    """Rows of 7, 3 and 1 divide unevenly, and leave some ranks with nothing; 8 columns divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.few, self.down = nn.Linear(8, 7), nn.Linear(8, 3), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.randn(1))


def tensor(model: Model, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "few": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim > 1 else 0)


def both(model: Model, mesh: DeviceMesh, *, by_columns: bool = False) -> None:
    tensor(model, mesh["tensor"])
    shard = mesh["replicate", "shard"] if mesh.ndim == 3 else mesh["shard"]
    fully_shard(model, mesh=shard, shard_placement_fn=columns if by_columns else None)


def compare(spread: Callable[[Model], None]) -> dict[str, object]:
    """What differs between the two ways, and what is not the value of one process once it is gathered."""
    torch.manual_seed(4)
    one_process = Model()
    values = {name: parameter.detach().clone() for name, parameter in one_process.named_parameters()}
    with torch.device("meta"):
        filled = Model()
    spread(one_process)
    spread(filled)
    sums = fill_parameters(filled, values, torch.device("cpu"))  # type: ignore[arg-type]
    expected = dict(one_process.named_parameters())
    differ, wrong, placements = [], [], []
    for name, parameter in filled.named_parameters():
        assert parameter.requires_grad
        placements += list(getattr(parameter, "placements", ()))
        if not torch.equal(local(parameter), local(expected[name])):
            differ.append(name)
        if not torch.equal(whole(parameter), values[name]):
            wrong.append(name)
    return {
        "differ": differ,
        "wrong": wrong,
        "filled": list(sums),
        "strided": sorted({p.dim for p in placements if isinstance(p, _StridedShard)}),
        "empty": any(not local(parameter).numel() for parameter in filled.parameters()),
    }


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


dist.init_process_group(
    "gloo",
    init_method=f"file://{FOLDER / 'meeting'}",
    rank=RANK,
    world_size=WORLD,
    timeout=timedelta(seconds=120),
)
row = init_device_mesh("cpu", (4,))
hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
names = ("replicate", "shard", "tensor")
cubes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=names) for shape in ((1, 2, 2), (2, 2, 1))}
notes = {
    "full sharding": compare(lambda model: fully_shard(model, mesh=row)),
    "hybrid": compare(lambda model: fully_shard(model, mesh=hybrid)),
    "tensor": compare(lambda model: tensor(model, row)),
    "tensor and rows": compare(lambda model: both(model, square)),
    "tensor and columns": compare(lambda model: both(model, square, by_columns=True)),
    "1 x 2 x 2": compare(lambda model: both(model, cubes[1, 2, 2])),
    "2 x 2 x 1": compare(lambda model: both(model, cubes[2, 2, 1])),
}
(FOLDER / f"notes-{RANK}.json").write_text(json.dumps(notes))
dist.destroy_process_group()
