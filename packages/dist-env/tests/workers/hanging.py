"""Three ranks of which the last does not come to a collective: it sleeps, or its process is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from dist_env import (
    DistributedEnvironment,
    Heartbeat,
    RankTimeoutError,
    StallReport,
    barrier,
    gather_objects,
)

how = sys.argv[1]


def train_step() -> None:
    dist.all_reduce(torch.ones(7, 3))


def fall_behind() -> None:
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


with DistributedEnvironment(log_level="WARNING") as env:
    processes = gather_objects(os.getpid(), env)

    def end(report: StallReport) -> None:
        print(report, flush=True)
        os.kill(processes[2], signal.SIGKILL)
        os._exit(3)

    dist.broadcast(torch.ones(5), src=0)
    if how == "late":
        if env.rank < 2:
            try:
                barrier(env, timeout=4, tag="save")
            except RankTimeoutError as error:
                print(error, flush=True)
            if env.rank == 0:
                time.sleep(5)  # it holds the store, which the other rank needs until its time has passed, too
        os._exit(0)
    with Heartbeat(env, stall_timeout=2, interval=0.3, on_stall=end) as heart:
        heart.beat(1, "all_reduce")
        fall_behind() if env.rank == 2 else train_step()
