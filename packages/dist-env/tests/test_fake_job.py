"""A job of which only this process exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dist_env
from dist_env import (
    DistributedEnvironmentError,
    barrier,
    broadcast_object,
    fake_job,
    gather_objects,
    is_alone,
    main_process_first,
    naming_lost_ranks,
)


def test_hundreds_of_ranks_meet_without_being_there() -> None:
    with fake_job(512, local_world_size=8) as env:
        assert (env.rank, env.world_size, env.local_world_size) == (0, 512, 8)
        assert is_alone(env)
        barrier(env, timeout=1)
        assert gather_objects({"seed": 1}, env) == [{"seed": 1}] * 512
        assert broadcast_object("mine", env, src=511) == "mine"
        with main_process_first(env) as goes_first, naming_lost_ranks(env, "training"):
            assert goes_first
        mesh = init_device_mesh("cpu", (64, 8), mesh_dim_names=("copies", "shards"))
        values = torch.ones(8)
        dist.all_reduce(values, group=mesh.get_group("shards"))
        assert mesh.get_group("copies").size() == 64
    assert not dist.is_initialized()


def test_any_rank_can_be_this_one() -> None:
    with fake_job(8, local_world_size=4, rank=6) as env:
        assert (env.rank, env.local_rank) == (6, 2)
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stages", "copies"))
        assert tuple(mesh.get_coordinate() or ()) == (1, 2)


def test_a_rank_that_there_is_not_is_refused() -> None:
    with (
        pytest.raises(DistributedEnvironmentError, match="RANK=8 contradicts WORLD_SIZE=8"),
        fake_job(8, rank=8),
    ):
        pass


def test_who_is_no_rank_of_it_cannot_be_asked() -> None:
    with fake_job(4) as env, pytest.raises(DistributedEnvironmentError, match="src=4 is not one"):
        broadcast_object("mine", env, src=4)


def test_the_old_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match="imagined_job is called fake_job now") as told:
        old = dist_env.imagined_job
    assert old is fake_job
    # Python shows such a warning only where it points to the caller's own file.
    assert told[0].filename == __file__


def test_one_rank_needs_no_group() -> None:
    with fake_job(1) as env:
        assert not dist.is_initialized()
        assert gather_objects(3, env) == [3]


def test_ranks_are_not_faked_beside_real_ones() -> None:
    with (
        fake_job(2),
        pytest.raises(DistributedEnvironmentError, match="world_size=3 cannot be faked"),
        fake_job(3),
    ):
        pass
    assert not dist.is_initialized()


def test_results_of_operators_are_on_the_mesh_of_the_rank_that_is_faked() -> None:
    for rank in (0, 2):
        with fake_job(4, rank=rank) as env:
            mesh = init_device_mesh(env.device_type, (2, 2), mesh_dim_names=("stages", "shard"))["shard"]
            alike = torch.empty_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
            assert dist.get_process_group_ranks(alike.device_mesh.get_group()) == [rank, rank + 1]
