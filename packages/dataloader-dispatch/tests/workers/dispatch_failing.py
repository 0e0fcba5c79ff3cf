"""Ranks that fail, one way each; the others tell what they are told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dispatch_loaders import RANK, WORLD, open_group, tell
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from dataloader_dispatch.connection import wait_for_finalizers
from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher
from dist_env import RankFailedError, RankTimeoutError

MODE = sys.argv[1]
resumed = threading.Event()


class Endless:
    """As many batches as one likes; it gets stuck at one of them if asked to."""

    batch_size = 1

    def __init__(self, stuck_at: int | None = None) -> None:
        self.stuck_at = stuck_at

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            if number == self.stuck_at:
                resumed.wait(1000)
            yield torch.full((20_000,), number)
            number += 1


class Dying(Dataset[torch.Tensor]):
    """A dataset whose worker process is killed at item 9."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


def die(number: int) -> None:
    what, _, victim = MODE.partition(" ")
    if number != 5 or victim != str(RANK):
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        # A child continues the process again, long after the others have given it up.
        if os.fork() == 0:
            time.sleep(8)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raise":
        raise ValueError("in the training loop")


def interrupt() -> None:
    """Ctrl-C, for this rank alone, once it has begun to wait."""
    threading.Timer(1.5, lambda: signal.raise_signal(signal.SIGINT)).start()


def running() -> list[str]:
    """Names of threads; Python before 3.12 keeps one of a closing thread that has ended."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("Dummy-")]


def dropped_while_traced(dispatcher: list[DataloaderDispatcher[Any]]) -> None:
    """One rank drops its last reference in the middle of a pass, as the collector may while it compiles."""
    passes = iter(dispatcher.pop())
    next(passes)
    if f"traced {RANK}" == MODE:
        with FakeTensorMode():
            start = time.monotonic()
            del passes
            seconds = time.monotonic() - start
        wait_for_finalizers()  # nobody else waits for what the collector closes
        tell({"seconds": seconds, "threads": running()})
    else:
        try:
            deque(passes, 0)
        except RankFailedError as error:
            tell({"rank": error.rank, "text": str(error)})
    dist.barrier()


def left_behind(dispatcher: DataloaderDispatcher[Any]) -> None:
    """Rank 1 takes four batches and closes, before rank 0 takes its first."""
    passes = iter(dispatcher)
    taken: list[int] = []
    if RANK == 1:
        taken = [int(next(passes)[0]) for _ in range(4)]
        dispatcher.close()
        tell({"taken": taken})
    dist.barrier()
    if RANK == 0:
        try:
            for batch in passes:
                taken.append(int(batch[0]))
                time.sleep(0.2)
        except RankFailedError as error:
            tell({"taken": taken[:4], "rank": error.rank})
    dist.barrier()


def begun_anew(dispatcher: DataloaderDispatcher[Any], told: Path) -> None:
    """Rank 2 is killed in a pass, and rank 1 leaves it for another one before it looks."""
    passes = iter(dispatcher)
    next(passes)
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while RANK == 0:
            next(passes)
        while not told.exists():
            time.sleep(0.05)
        next(iter(dispatcher))
    except RankFailedError as error:
        told.touch()
        tell({"rank": error.rank})


def late() -> None:
    """The loader of rank 0 has batches again after all were told that it gave none."""
    passes, told = iter(dispatcher), []
    for _ in range(12):
        try:
            next(passes)
        except RankTimeoutError as error:
            told.append(error.missing)
            resumed.set()
            for thread in threading.enumerate():
                if thread.name == "dataloader-dispatch":
                    thread.join(2)  # it ends, as what it reads is not wanted
    tell({"told": [list(missing) for missing in told]})


def loader() -> Any:
    if RANK != 0:
        return None
    if MODE == "worker":
        return DataLoader(Dying(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    return Endless(12 if MODE in ("stuck", "late", "interrupt") else None)


open_group()
timeout = 3 if MODE in ("stuck", "late") or MODE.startswith("stop") else 60
ranks = init_device_mesh("cpu", (WORLD,))
dispatcher = DataloaderDispatcher(loader(), ranks, "cpu", timeout_seconds=timeout)
if MODE.startswith("traced"):
    held = [dispatcher]
    del dispatcher
    dropped_while_traced(held)
    sys.exit()
if MODE == "late":
    late()
    sys.exit()
if MODE == "left behind":
    left_behind(dispatcher)
    sys.exit()
if MODE == "anew":
    begun_anew(dispatcher, Path(sys.argv[2]))
    sys.exit()
if MODE == "interrupt" and RANK == 1:
    interrupt()
note: dict[str, Any] = {"count": 0}
start = time.monotonic()
try:
    for number, _ in enumerate(dispatcher):
        note["count"] += 1
        start = time.monotonic()
        die(number)
        if MODE == "destroy" and number == 5:
            dist.destroy_process_group()
            break
        time.sleep(0.02)
except BaseException as error:
    note |= {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    note |= {"rank": getattr(error, "rank", None), "missing": list(getattr(error, "missing", []))}
    note["notes"] = getattr(error, "__notes__", [])
    tell(note)
    if MODE.startswith("raise") or MODE == "interrupt":
        raise
tell(note)
