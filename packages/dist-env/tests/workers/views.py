"""Each rank makes the meshes of each layout named as an argument, and notes the ranks of each view."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dist_env import DistributedEnvironment, Meshes, ParallelLayout

VIEWS = ("data", "fsdp", "loss", "replicate", "tensor", "context", "pipeline", "expert", "expert_fsdp")
notes: dict[str, dict[str, tuple[list[int], float, float]]] = {}
with DistributedEnvironment(no_accelerator=True) as env:
    for text in sys.argv[1:]:
        meshes = Meshes(ParallelLayout.parse(text, env.world_size), env.device_type)
        notes[text] = {}
        for view in VIEWS:
            mesh = getattr(meshes, view)
            if mesh is not None:
                total = torch.tensor(float(env.rank))
                dist.all_reduce(total, group=mesh.get_group())
                # A rank alone gives itself what it has, also where the result is another tensor.
                share, given = torch.zeros(()), [torch.tensor(float(env.rank))] * mesh.size()
                dist.reduce_scatter(share, given, group=mesh.get_group())
                notes[text][view] = (
                    dist.get_process_group_ranks(mesh.get_group()),
                    total.item(),
                    share.item(),
                )
Path(os.environ["NOTES"]).write_text(json.dumps(notes))
