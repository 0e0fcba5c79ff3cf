"""Meshes on real ranks, and on fake ones: the groups of every view are those of the layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ports import free_port
from torch.distributed.device_mesh import DeviceMesh

from dist_env import DistributedEnvironmentError, Meshes, ParallelLayout, fake_job

LAYOUTS = {
    2: ["dp=2", "shard=2", "cp=2", "tp=2", "pp=2", "shard=2,ep=2"],
    4: ["dp=2,shard=2", "shard=2,cp=2", "dp=2,cp=2", "shard=2,tp=2,ep=2", "pp=2,tp=2", "shard=2,cp=2,ep=4"],
}
VIEWS = ("data", "fsdp", "loss", "replicate", "tensor", "context", "pipeline", "expert", "expert_fsdp")


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_real_ranks_are_those_of_the_layout(launch: Callable[..., Any], ranks: int) -> None:
    job = launch("views.py", ranks, *LAYOUTS[ranks])
    assert job.codes == [0] * ranks, job.err
    for rank, notes in enumerate(job.notes):
        for text in LAYOUTS[ranks]:
            layout = ParallelLayout.parse(text)
            for view, (members, total, share) in notes[text].items():
                assert tuple(members) == layout.group(view, rank), (text, view, rank)
                assert total == sum(members), "an all-reduce of the view adds its ranks"
                assert share == sum(members), "a reduce-scatter as well"
            assert ("expert" in notes[text]) == (layout.expert > 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the names of threads")
def test_jobs_in_turn_do_not_gather_threads(launch: Callable[..., Any]) -> None:
    ports = " ".join(str(free_port()) for _ in range(3))
    job = launch("jobs_in_turn.py", 2, MORE_PORTS=ports)
    assert job.codes == [0, 0], job.err
    for notes in job.notes:
        # One group has all ranks, and dimensions of one rank have none. torch holds the last job's at most.
        assert max(notes["open"]) <= 2
        assert max(notes["closed"]) <= 1


@pytest.mark.parametrize(("rank", "expert"), [(0, 1), (13, 6), (95, 12)])
def test_fake_ranks_have_the_groups_of_the_layout(rank: int, expert: int) -> None:
    layout = ParallelLayout(pipeline=2, replicate=4, shard=3, context=2, tensor=2, expert=expert)
    with fake_job(96, rank=rank):
        meshes = Meshes(layout)
        for view in VIEWS:
            mesh: DeviceMesh | None = getattr(meshes, view)
            if mesh is None:
                assert expert == 1
                continue
            # torch numbers the ranks of a mesh and those of its group alike.
            assert tuple(mesh.mesh.tolist()) == layout.group(view, rank)
            assert tuple(dist.get_process_group_ranks(mesh.get_group())) == layout.group(view, rank)
        for name, view in (("hsdp", "fsdp"), ("expert_hsdp", "expert_fsdp")):
            both: DeviceMesh | None = getattr(meshes, name)
            if both is None:
                assert (name, expert) == ("expert_hsdp", 1)
                continue
            for dimension, group in enumerate(("replicate", view)):
                members = dist.get_process_group_ranks(both.get_group(dimension))
                assert tuple(members) == layout.group(group, rank), (name, group)
        assert repr(meshes) == f"Meshes('{layout}')"


@pytest.mark.parametrize("text", ["dp=2,shard=2", "dp=2,cp=2", "dp=2,tp=2,ep=2", "shard=2,cp=2,ep=2"])
def test_replicas_beside_what_shards(text: str) -> None:
    layout = ParallelLayout.parse(text)
    with fake_job(4, rank=3):
        meshes = Meshes(layout)
        assert (meshes.hsdp is None) == (layout.replicate == 1)
        assert (meshes.expert_hsdp is None) == (layout.replicate == 1 or layout.expert == 1)
        if meshes.hsdp is not None:
            assert meshes.hsdp.shape == (layout.replicate, layout.shard * layout.context)
        if meshes.expert_hsdp is not None:
            assert meshes.expert_hsdp.shape == (layout.replicate, layout.expert_fsdp)


def test_a_layout_of_another_size_and_a_missing_group_are_refused() -> None:
    with (
        fake_job(4),
        pytest.raises(DistributedEnvironmentError, match="tp=2 needs 2 ranks, but 4 were started"),
    ):
        Meshes(ParallelLayout(tensor=2))
    with pytest.raises(DistributedEnvironmentError, match="need a process group"):
        Meshes(ParallelLayout())
