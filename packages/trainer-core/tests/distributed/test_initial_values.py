"""Initial values of DTensors: those that torch gives each rank, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_core import ConfigurationError, fill_parameters

SHARDS = 3
WHOLE = torch.arange(1.0, 15.0).view(7, 2)


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[int, DeviceMesh]]:
    """A row of ranks, and a square of them, seen from the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2 * SHARDS, store=FakeStore())
    try:
        row = init_device_mesh("cpu", (2 * SHARDS,))
        yield {1: row, 2: init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("replicate", "shard"))}
    finally:
        dist.destroy_process_group()


def shown(placements: tuple[Placement, ...]) -> list[Placement]:
    return [Replicate() if placement.is_partial() else placement for placement in placements]


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        super().__init__()
        local = distribute_tensor(WHOLE, mesh, shown(placements), src_data_rank=None).to_local().to("meta")
        weight = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
        )
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize(
    ("dimensions", "placements"),
    [
        (1, (Shard(0),)),
        (1, (Shard(1),)),
        (1, (Replicate(),)),
        (1, (_StridedShard(0, split_factor=2),)),
        (2, (Replicate(), Shard(0))),
        (2, (Shard(0), Replicate())),
        (2, (Shard(0), Shard(0))),
        (2, (Shard(1), Shard(0))),
        (2, (Replicate(), Replicate())),
        (2, (_StridedShard(0, split_factor=SHARDS), Shard(0))),
    ],
)
def test_initial_values_are_those_that_torch_gives_this_rank(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    mesh = meshes[dimensions]
    model = Model(mesh, placements)
    fill_parameters(model, {"weight": WHOLE}, torch.device("cpu"))  # type: ignore[arg-type]
    expected = distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)
    assert torch.equal(model.weight.data._local_tensor, expected._local_tensor)  # type: ignore[attr-defined]
    assert model.weight.placements == placements  # type: ignore[attr-defined]


@pytest.mark.parametrize(("dimensions", "placements"), [(1, (Partial(),)), (2, (Partial(), Shard(0)))])
def test_initial_values_of_a_partial_parameter_are_refused(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    model = Model(meshes[dimensions], placements)
    with pytest.raises(ConfigurationError, match=r"parallel='weight'.*placements.*Partial"):
        fill_parameters(model, {"weight": WHOLE}, torch.device("cpu"))  # type: ignore[arg-type]
    assert model.weight.is_meta, "nothing was allocated"
