"""Each rank opens one environment after another, computes on meshes, and notes the threads that stay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dist_env import DistributedEnvironment, Meshes, ParallelLayout


def threads_of_gloo() -> int:
    """Threads whose names say that they belong to a group."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum("gloo_tcp" in task.read_text() for task in tasks)


notes: dict[str, list[int]] = {"open": [], "closed": []}
for number, text in enumerate(("tp=2", "shard=2", "dp=2", "tp=2")):
    if number:
        os.environ["MASTER_PORT"] = os.environ["MORE_PORTS"].split()[number - 1]
    with DistributedEnvironment(no_accelerator=True) as env:
        meshes = Meshes(ParallelLayout.parse(text), env.device_type)
        for mesh in (meshes.tensor, meshes.fsdp, meshes.replicate):
            if mesh.size() > 1:
                divided = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
                assert (divided @ divided).redistribute(placements=[Replicate()]).to_local().sum() == 64
                del divided
        notes["open"].append(threads_of_gloo())
        del meshes, mesh
    notes["closed"].append(threads_of_gloo())
Path(os.environ["NOTES"]).write_text(json.dumps(notes))
