"""Gradient norms and initial values of DTensors: right where they are supported, refused elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_core import ConfigurationError, fill_parameters
from trainer_core.optimization import clip_grad_norm

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


def gradient(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    shown = [Replicate() if placement.is_partial() else placement for placement in placements]
    parameter = nn.Parameter(distribute_tensor(WHOLE, mesh, shown, src_data_rank=None))
    local = parameter.data._local_tensor.clone()
    parameter.grad = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    return parameter


REFUSED = [
    (1, (Replicate(),)),
    (1, (Partial(),)),
    (2, (Shard(0), Shard(0))),
    (2, (Shard(0), Replicate())),
    (2, (Partial(), Shard(0))),
    (2, (Replicate(), Replicate())),
]


@pytest.mark.parametrize(("dimensions", "placements"), REFUSED)
def test_gradients_that_would_be_counted_several_times_are_refused(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    made = gradient(meshes[dimensions], placements)
    with pytest.raises(ConfigurationError, match=r"gradient of shape \[7, 2\].*placements"):
        clip_grad_norm([made], 1.0, over_ranks=lambda square: square)


def test_gradients_of_several_kinds_are_refused(meshes: dict[int, DeviceMesh]) -> None:
    sharded = gradient(meshes[1], (Shard(0),))
    plain = nn.Parameter(WHOLE.clone())
    plain.grad = WHOLE.clone()
    for other in (plain, gradient(meshes[2], (Replicate(), Shard(0)))):
        with pytest.raises(ConfigurationError, match="on another mesh"):
            clip_grad_norm([sharded, other], 1.0, over_ranks=lambda square: square)


@pytest.mark.parametrize(("dimensions", "placements"), [(1, (Shard(1),)), (2, (Replicate(), Shard(0)))])
def test_parts_of_the_gradient_are_added_up_and_scaled(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    made, uncounted = (gradient(meshes[dimensions], placements) for _ in range(2))
    part = made.grad._local_tensor.clone()  # type: ignore[union-attr]
    others = 100.0

    def over_ranks(square: Tensor) -> Tensor:
        assert square.dtype is torch.float64
        assert square.item() == pytest.approx(part.square().sum().item())
        return square + others

    norm = clip_grad_norm([made], 2.0, over_ranks=over_ranks, uncounted=[uncounted])
    expected = (part.square().sum() + others).sqrt()
    torch.testing.assert_close(norm, expected)
    for each in (made, uncounted):
        local = each.grad._local_tensor  # type: ignore[union-attr]
        torch.testing.assert_close(local, part * (2.0 / (expected + 1e-6)))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        super().__init__()
        whole = WHOLE.to("meta")
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, list(placements), src_data_rank=None))


@pytest.mark.parametrize(
    ("dimensions", "placements"),
    [*(case for case in REFUSED if not any(p.is_partial() for p in case[1])), (1, (Shard(1),))],
)
def test_initial_values_are_not_taken_from_the_wrong_rows(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    model = Model(meshes[dimensions], placements)
    with pytest.raises(ConfigurationError, match=r"parallelism='weight'.*placements"):
        fill_parameters(model, {"weight": WHOLE}, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dimensions", "placements"), [(1, (Shard(0),)), (2, (Replicate(), Shard(0)))])
def test_initial_values_of_rows(
    meshes: dict[int, DeviceMesh], dimensions: int, placements: tuple[Placement, ...]
) -> None:
    model = Model(meshes[dimensions], placements)
    fill_parameters(model, {"weight": WHOLE}, torch.device("cpu"))  # type: ignore[arg-type]
    local = model.weight.data._local_tensor  # type: ignore[attr-defined]
    assert torch.equal(local, WHOLE[: len(local)])
    assert len(local) == (2 if dimensions == 1 else 3)
