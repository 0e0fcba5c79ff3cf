"""Two ranks, one of which goes wrong."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_env import DistributedEnvironment, DistributedEnvironmentError, RankFailedError, barrier


def disagree_then_train() -> None:
    """The ranks first name different backends; then they train with DDP and leave.

    DDP holds the group in reference cycles; leaving must not abort the interpreter.
    """
    backends = ("gloo", "cpu:gloo")
    first = DistributedEnvironment(init_timeout=30)
    try:
        DistributedEnvironment(backend=backends[first.rank], init_timeout=30).open()
    except (DistributedEnvironmentError, RankFailedError) as error:
        print(f"refused: {error}")
    with first as env:
        model = DistributedDataParallel(nn.Linear(8, 8))
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
        barrier(env, timeout=30)
        print(f"port {env.master_port}")


def fail_amid_a_collective() -> None:
    """On the first start rank 1 raises while an all-reduce that rank 0 never joins is under way."""
    with DistributedEnvironment() as env:
        barrier(env, timeout=30)
        if env.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            dist.all_reduce(torch.ones(4), async_op=True)
            raise ValueError("the data of rank 1 is bad")
        barrier(env, timeout=60)
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"rank {env.rank} done, sum {total.item()}")


if __name__ == "__main__":
    {"disagree": disagree_then_train, "fail": fail_amid_a_collective}[sys.argv[1]]()
