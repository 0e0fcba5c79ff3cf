"""Ranks that lose one of them, or believe so; each notes which error it gets, and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_env import (
    DistributedEnvironment,
    DistributedEnvironmentError,
    RankFailedError,
    StaticDistributedEnvironment,
    barrier,
    gather_objects,
    naming_lost_ranks,
)
from dist_env.coordination import Coordinator

NOTES = Path(os.environ["NOTES"])
LARGE = 20_000_000
notes: dict[str, object] = {}


def write() -> None:
    NOTES.write_text(json.dumps(notes))


def kill() -> None:
    notes["killed"] = time.time()
    write()
    os.kill(os.getpid(), signal.SIGKILL)


def note(key: str, error: BaseException) -> None:
    cause = error.__cause__
    rank = error.rank if isinstance(error, RankFailedError) else "none"
    notes[key] = [str(error), rank, type(cause).__name__, str(cause), time.time()]


def reduce_until_killed(env: DistributedEnvironment, victim: int) -> None:
    """All-reduce until rank `victim` is killed in the middle of one."""
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    if env.rank == victim:
        threading.Timer(0.3, kill).start()
    try:
        with naming_lost_ranks(env, lambda: f"step {2 + 1}: all-reduce"):
            while True:
                dist.all_reduce(tensor)
    except RankFailedError as error:
        note("killed", error)
        raise


def other_errors(env: DistributedEnvironment) -> None:
    """Errors that no collective raised pass as they are."""
    told = []
    errors = (
        ValueError("bad data"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 9x8)"),
        RuntimeError("no file /data/gloo/transport/tcp/pair.cc:1"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RankFailedError("named before", 1),
    )
    for error in errors:
        try:
            with naming_lost_ranks(env, "step 1"):
                raise error
        except (ValueError, RuntimeError) as caught:
            told.append(caught is error)
    notes["passed"] = told


def too_late(env: DistributedEnvironment) -> None:
    """Rank 1 computes for longer than the collective waits."""
    pair = dist.new_group(timeout=timedelta(seconds=1))
    if env.rank == 1:
        time.sleep(3.0)
        return
    try:
        with naming_lost_ranks(env, "step 2"):
            dist.all_reduce(torch.ones(1), group=pair)
    except RankFailedError as error:
        note("late", error)


def duo() -> None:
    with naming_lost_ranks(StaticDistributedEnvironment(), "alone"):
        notes["alone"] = True
    with DistributedEnvironment(training_timeout=60) as env:
        other_errors(env)
        too_late(env)
        reduce_until_killed(env, 1)


def quad() -> None:
    """Rank 3 comes to `naming_lost_ranks` only after rank 0 has missed it; then rank 2 dies in a backward."""
    with DistributedEnvironment(training_timeout=90) as env:
        pair = dist.new_group([0, 3], timeout=timedelta(seconds=1))
        if env.rank == 0:
            try:
                with naming_lost_ranks(env, "step 0", seconds=3.0):
                    dist.all_reduce(torch.ones(1), group=pair)
            except RankFailedError as error:
                note("unheard", error)
        elif env.rank < 3:
            with naming_lost_ranks(env, "step 0"):
                time.sleep(0.1)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(500, 500) for _ in range(6))))
        try:
            with naming_lost_ranks(env, "step 4: backward"):
                for step in range(10_000):
                    loss = model(torch.randn(4, 500)).sum()
                    if env.rank == 2 and step == 3:
                        threading.Timer(0.02, kill).start()
                    loss.backward()
        except RankFailedError as error:
            note("killed", error)
            raise


def holder() -> None:
    with DistributedEnvironment(training_timeout=60) as env:
        reduce_until_killed(env, 0)


def kill_after_this_process(pid: int) -> None:
    """A helper whose input ends when this process does; not before, as Python knows nothing of the pipe."""
    end_to_read, _ = os.pipe()
    line = ["sh", "-c", 'cat; kill -9 "$0"', str(pid)]
    subprocess.Popen(line, stdin=end_to_read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def frozen() -> None:
    """Rank 0, which holds the store, is stopped until rank 1 has ended; a helper ends it then."""
    with suppress(RankFailedError), DistributedEnvironment(training_timeout=3) as env:
        pids = gather_objects(os.getpid(), env)
        if env.rank == 1:
            kill_after_this_process(pids[0])
        try:
            with naming_lost_ranks(env, "step 5", seconds=1.0):
                if env.rank == 1:
                    NOTES.with_name("watched").touch()
                else:
                    # The thread of the liveness check is there by then, on both ranks.
                    while not NOTES.with_name("watched").exists():
                        time.sleep(0.02)
                    time.sleep(1.0)
                    os.kill(os.getpid(), signal.SIGSTOP)
                notes["froze"] = time.time()
                dist.all_reduce(torch.ones(1))
        except RankFailedError as error:
            note("frozen", error)
            raise
    notes["left"] = time.time()


def leave(victim_error: Exception | None) -> None:
    """Rank 1 ends with an error of its own, or in good order, while rank 0 waits for it."""
    with DistributedEnvironment(training_timeout=60) as env:
        dist.all_reduce(torch.ones(1))
        try:
            with naming_lost_ranks(env, "step 6"):
                if env.rank == 0:
                    dist.all_reduce(torch.ones(1))
                elif victim_error is not None:
                    raise victim_error
        except RankFailedError as error:
            note("left", error)
            raise


def waits() -> None:
    """Rank 1 is late at one barrier, for longer than a rank may be silent, and dies soon after.

    Its connection for liveness checks opens slowly, as on a busy machine: it must have answered all the same.
    """
    if os.environ["RANK"] == "1":
        open_at_once = Coordinator.clone

        def open_slowly(coordinator: Coordinator) -> Coordinator:
            time.sleep(2.0)
            return open_at_once(coordinator)

        Coordinator.clone = open_slowly  # type: ignore[method-assign]
    with DistributedEnvironment(training_timeout=600) as env:
        try:
            barrier(env, lost_after=0)
        except DistributedEnvironmentError as error:
            notes["refused"] = str(error)
        for step in range(2):
            if env.rank == 1:
                time.sleep(9.0 if step == 0 else 0.1)
            barrier(env, tag=f"step {step}", lost_after=2.0)
            notes[f"passed {step}"] = time.time()
        if env.rank == 1:
            kill()
        try:
            barrier(env, tag="step 2", lost_after=2.0)
        except RankFailedError as error:
            note("killed", error)
            raise


CASES = {
    "waits": waits,
    "duo": duo,
    "quad": quad,
    "holder": holder,
    "frozen": frozen,
    "fails": lambda: leave(ValueError("the data of rank 1 is bad")),
    "leaves": lambda: leave(None),
}

if __name__ == "__main__":
    try:
        CASES[sys.argv[1]]()
    finally:
        write()
