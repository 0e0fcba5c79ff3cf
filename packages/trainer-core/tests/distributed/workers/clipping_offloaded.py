"""Two ranks on one GPU, whose group serves the GPU alone, clip gradients that rest on the host."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from trainer_core.distributed.executor import clip_grad_norm_

FOLDER, RANK = Path(os.environ["FOLDER"]), int(os.environ["RANK"])

torch.cuda.set_device(0)
dist.init_process_group(
    "cuda:gloo",
    init_method=f"file://{FOLDER / 'meeting'}",
    rank=RANK,
    world_size=2,
    timeout=timedelta(seconds=120),
)
model = nn.Linear(50, 2, bias=False)
fully_shard(model, mesh=init_device_mesh("cuda", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
model.weight.grad = torch.ones_like(model.weight)
norm = clip_grad_norm_(model.parameters(), 1.0)
local = model.weight.grad.to_local()
notes = {"norm": norm.item(), "device": norm.device.type, "gradient": local.flatten()[:4].tolist()}
(FOLDER / f"notes-{RANK}.json").write_text(json.dumps(notes))
dist.destroy_process_group()
