"""What a rank holds of a DTensor is what torch gives it, for any mesh, placements and sizes."""

from itertools import pairwise, product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from checkpoint_core import CheckpointError, local_ranges
from checkpoint_core.encoding import local_part
from dist_env import fake_job

ANY = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
SIZES = [(1, 5), (2, 1), (5, 2), (6, 0), (7, 4), (12, 6), (0, 3)]
THREE = [
    (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(0), Shard(1)),
    (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)),
    (Shard(0), Shard(0), Shard(0)),
]
LAYOUTS: list[tuple[tuple[int, ...], list[tuple[Placement, ...]]]] = [
    ((4,), [(placement,) for placement in ANY]),
    ((2, 3), list(product(ANY, ANY))),
    ((2, 2, 2), THREE),
]


def placed(whole: torch.Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    mesh = init_device_mesh("cpu", shape)
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


@pytest.mark.parametrize(("shape", "layouts"), LAYOUTS, ids=["row", "plane", "cube"])
def test_the_ranges_are_those_of_torch(shape: tuple[int, ...], layouts: list[tuple[Placement, ...]]) -> None:
    world = torch.Size(shape).numel()
    several = 0
    for rank in range(world):
        with fake_job(world, rank=rank):
            for placements, size in product(layouts, SIZES):
                whole = torch.arange(size[0] * size[1]).view(size)
                tensor = placed(whole, shape, placements)
                ranges = local_ranges(tensor)
                rows, columns = ([at for each in ranges[dim] for at in each] for dim in (0, 1))
                assert torch.equal(whole[rows][:, columns], tensor.to_local()), (placements, size, rank)
                assert all(each for dim in ranges for each in dim), "no range is empty"
                several += any(len(dim) > 1 for dim in ranges)
                for earlier, later in (pair for dim in ranges for pair in pairwise(dim)):
                    assert earlier.stop != later.start, "neighbours are one range"
    assert bool(several) is (len(shape) < 3)


def test_of_a_scalar_there_is_nothing_to_divide() -> None:
    with fake_job(2):
        assert local_ranges(placed(torch.tensor(1.0), (2,), (Replicate(),))) == []


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with fake_job(4, rank=3):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        inside = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
        tensor = distribute_tensor(torch.ones(4, 2), inside, [Shard(0)], src_data_rank=None)
        assert local_ranges(tensor) == [[], []]
        assert mesh.get_coordinate() is not None


def test_partial_sums_are_refused() -> None:
    with fake_job(2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(CheckpointError, match=r"shape \[4, 2\].*Partial.*redistribute"):
            local_ranges(tensor)


def test_a_part_of_several_boxes_and_one_of_another_size_are_not_saved() -> None:
    with fake_job(2, rank=1):
        strided = placed(torch.arange(8.0), (2,), (_StridedShard(0, split_factor=2),))
        assert local_ranges(strided) == [[range(2, 4), range(6, 8)]]
        with pytest.raises(CheckpointError, match=r"x is placed as .*more than one box"):
            local_part(strided, "x")
        mesh = strided.device_mesh
        for rows, claimed in ((3, 4), (2, 1)):
            wrong = DTensor.from_local(
                torch.ones(rows), mesh, [Shard(0)], run_check=False, shape=torch.Size([claimed]), stride=(1,)
            )
            with pytest.raises(CheckpointError, match="x is placed as"):
                local_part(wrong, "x")
