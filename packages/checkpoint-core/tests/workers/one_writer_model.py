"""Two ranks on hosts of their own save a sharded model of transformers. Usage: one_writer_model.py DIRECTORY

Saves steps 1 and 2 to DIRECTORY/run, exports to DIRECTORY/exported, and keeps all weights in DIRECTORY/whole.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from checkpoint_core import CheckpointConfig, CheckpointManager
from dist_env import StaticDistributedEnvironment


def run(rank: int, directory: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=16))
    if rank == 0:
        torch.save(model.state_dict(), directory / "whole")
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    env = StaticDistributedEnvironment(rank=rank, world_size=2, local_world_size=1, backend="gloo")
    config = CheckpointConfig(directory / "run", timeout_seconds=60)
    with CheckpointManager(config, {"model": model}, dist=env) as manager:
        manager.save(1)
        manager.save(2)
        manager.save_model(directory / "exported")
    dist.destroy_process_group()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    child = os.fork()
    run(0 if child else 1, directory)
    if child and os.waitpid(child, 0)[1]:
        raise SystemExit("rank 1 failed")


if __name__ == "__main__":
    main()
