"""A sign of life of every rank, and on rank 0 a watchdog that reads them.

Both go through a connection of their own to the store, so that they work while the collective backend hangs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import torch.distributed as dist

from dist_env.collectives import coordinator_of
from dist_env.coordination import Coordinator
from dist_env.errors import DistributedEnvironmentError, one_line
from dist_env.interface import DistributedEnvInterface
from dist_env.logging import get_logger
from dist_env.records import RankRecord
from dist_env.stall import StallReport
from dist_env.stores import hash_store
from dist_env.watchdog import Watchdog

logger = get_logger("dist_env")

_STACK_FRAMES = 8
# A thread that talks to a host that is gone may hang; ending the program does not wait for it.
_JOIN_SECONDS = 5.0


class _Place(NamedTuple):
    """Where the rank last said it was."""

    step: int
    phase: str
    order: int
    thread: int
    since: float


class Heartbeat:
    """Says where this rank is; on rank 0 also watches all ranks and reports a stall.

    Use it as a context manager on every rank. `beat` only notes step and phase, which costs less than a
    microsecond; a thread publishes the note. A rank whose last beat is older than `stall_timeout` seconds
    counts as stalled; rank 0 then logs who is missing and where each rank is, with the Python stack of those
    missing. A rank that leaves with an exception is reported at once.

    Args:
        env: Environment of this process.
        stall_timeout: Seconds without a beat after which a rank counts as stalled. Choose it above the
            longest phase, including compilation and checkpoint writing.
        interval: Seconds between two publications.
        on_stall: Called on rank 0 in the watchdog's thread after the report was logged, for example to end
            the process.

    Raises:
        DistributedEnvironmentError: A time is not positive, or there are several ranks but no process group.
    """

    def __init__(
        self,
        env: DistributedEnvInterface,
        *,
        stall_timeout: float = 300.0,
        interval: float = 1.0,
        on_stall: Callable[[StallReport], None] | None = None,
    ) -> None:
        for name, seconds in (("stall_timeout", stall_timeout), ("interval", interval)):
            if not seconds > 0:
                raise DistributedEnvironmentError(f"{name}={seconds!r} is not a positive number of seconds.")
        self._rank = env.rank
        self._world_size = env.world_size
        self._stall_timeout = stall_timeout
        self._interval = min(interval, stall_timeout / 4)
        self._on_stall = on_stall
        shared = _coordinator(env)
        self._prefix = f"heartbeat/{shared.next_call('heartbeat')}"
        self._coordinator = shared.clone() if env.world_size > 1 else shared
        self._place = _Place(0, "start", 0, threading.get_ident(), time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watchdog: Watchdog | None = None
        self._published = 0

    def beat(self, step: int, phase: str) -> None:
        """Note that this rank has reached a phase of a step.

        Call it wherever a rank may come to wait, in the same order on every rank: the watchdog compares how
        far the ranks are.

        Args:
            step: Number of the step; grows.
            phase: What begins now, for example `data`, `forward`, `backward`, `optimizer`, `save`.
        """
        last = self._place
        order = last.order + 1 if step == last.step else 0
        self._place = _Place(step, phase, order, threading.get_ident(), time.monotonic())

    def start(self) -> Self:
        """Begin to publish and, on rank 0, to watch.

        Raises:
            RuntimeError: It was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this Heartbeat was started before; make a new one.")
        self._place = _Place(0, "start", 0, threading.get_ident(), time.monotonic())
        self._thread = threading.Thread(target=self._publish_forever, name="heartbeat", daemon=True)
        self._thread.start()
        if self._rank == 0:
            watched = self._coordinator.clone() if self._world_size > 1 else self._coordinator
            self._watchdog = Watchdog(
                watched, self._prefix, self._stall_timeout, interval=self._interval, on_stall=self._on_stall
            )
            self._watchdog.start()
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """Publish a last sign of life and end the threads.

        Args:
            error: What this rank failed with, if it did; rank 0 reports it.
        """
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            try:
                self._publish(
                    "done" if error is None else "failed", None if error is None else one_line(error)
                )
            except dist.DistError:
                logger.debug("the store was gone before the last heartbeat.")
        if self._watchdog is not None:
            self._watchdog.stop()

    def _publish_forever(self) -> None:
        try:
            while True:
                self._publish("running", None)
                if self._stop.wait(self._interval):
                    return
        except dist.DistError:
            place = self._place
            logger.warning(
                "the store of the job is gone, and with it the heartbeat: whoever held it (rank 0, or the "
                "launcher) has ended; this rank was at step %d in phase %r.",
                place.step,
                place.phase,
            )

    def _publish(self, state: str, error: str | None) -> None:
        place = self._place
        age = time.monotonic() - place.since
        self._published += 1
        sign = {
            "number": self._published,
            "host": self._coordinator.record.host,
            "step": place.step,
            "phase": place.phase,
            "order": place.order,
            "age": age,
            "state": state,
            "error": error,
            "stack": _stack(place.thread) if age > self._stall_timeout / 2 else [],
        }
        self._coordinator.store.set(f"{self._prefix}/{self._rank}", json.dumps(sign))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)


def _coordinator(env: DistributedEnvInterface) -> Coordinator:
    """What the ranks share; one process alone needs no network for it."""
    if env.world_size > 1:
        return coordinator_of(env)
    return Coordinator(hash_store(), RankRecord.of(env))


def _stack(thread: int) -> list[str]:
    """The innermost Python frames of a thread, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
    return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in frames]
