"""Two ranks, of which one finds a file in the cache directory that others may write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

from dist_env import StaticDistributedEnvironment
from trainer_core import ConfigurationError, DataError, Ranks, TrainingArguments
from trainer_core.model import check_cache_dir

FOLDER, RANK, WORLD = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

cache = FOLDER / f"cache-{RANK}"  # as nodes with disks of their own have it
cache.mkdir(mode=0o700)
(cache / "rank-00000.zip").touch(0o600)
(cache / "rank-00000.zip").chmod(0o666 if RANK == 1 else 0o600)
args = TrainingArguments(seed=7, use_cpu=True, torch_compile=True, torch_compile_cache_dir=str(cache))
dist.init_process_group("gloo", init_method=f"file://{FOLDER / 'meeting'}", rank=RANK, world_size=WORLD)
ranks = Ranks(StaticDistributedEnvironment(rank=RANK, world_size=WORLD, local_rank=0, local_world_size=1))
ranks.connect()
said = ""
try:
    check_cache_dir(args, ranks)
except (ConfigurationError, DataError) as error:
    said = str(error)
(FOLDER / f"notes-{RANK}.json").write_text(json.dumps({"said": said}))
dist.destroy_process_group()
