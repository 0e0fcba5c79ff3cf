"""A sign of life of every rank, and on rank 0 a watchdog that reads them and reports a stall.

Both go through a connection of their own to the store, so that they work while the collective backend hangs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple, Self

from torch import distributed as dist

from dist_env.coordination import Coordinator, RankRecord, coordinator_of
from dist_env.errors import DistributedEnvironmentError, one_line
from dist_env.flight_recorder import active_recorder
from dist_env.interface import DistributedEnvInterface
from dist_env.logging import get_logger
from dist_env.tables import format_table

logger = get_logger("dist_env")

RankState = Literal["running", "silent", "unknown", "failed", "done"]

# A thread whose innermost Python frame is here waits for other ranks.
_WAITING_PLACES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "dist_env/coordination.py",
)
_STACK_FRAMES = 8
# A thread that talks to a host that is gone may hang; ending the program does not wait for it.
_JOIN_SECONDS = 5.0
# How long the report of a stall waits for the traces of the other ranks.
_DUMP_SECONDS = 3.0


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
        self._dumped = False

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
            raise RuntimeError("this Heartbeat was started before. Make a new one.")
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
                self._dump_if_asked()
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

    def _dump_if_asked(self) -> None:
        """Write the flight recorder's trace, once, if the watchdog of rank 0 has seen a stall."""
        recorder, store = active_recorder(), self._coordinator.store
        if recorder is None or self._dumped or not store.check([f"{self._prefix}/stall"]):
            return
        self._dumped = True
        recorder.dump(store.get(f"{self._prefix}/stall").decode())
        store.set(f"{self._prefix}/dumped/{self._rank}", "1")

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
    return Coordinator(dist.HashStore(), RankRecord.of(env))  # type: ignore[attr-defined]  # undeclared


def _stack(thread: int) -> list[str]:
    """The innermost Python frames of a thread, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
    return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in frames]


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A published heartbeat. Ages are seconds on the publishing rank, so that no clocks need to agree."""

    number: int
    host: str
    step: int
    phase: str
    order: int
    age: float
    state: RankState
    error: str | None
    stack: list[str]


class Watchdog:
    """Reads heartbeats and reports a stall.

    Args:
        coordinator: Coordinator with a connection of its own.
        prefix: Key prefix of the heartbeats.
        stall_timeout: Seconds without a beat that count as a stall.
        interval: Seconds between two looks; also the interval at which ranks publish.
        on_stall: Called with each report after it was logged.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        prefix: str,
        stall_timeout: float,
        *,
        interval: float,
        on_stall: Callable[[StallReport], None] | None,
    ) -> None:
        self._coordinator = coordinator
        self._prefix = prefix
        self._stall_timeout = stall_timeout
        self._interval = interval
        self._on_stall = on_stall
        self._silent_after = max(5 * interval, 2.0)
        self._started = time.monotonic()
        self._heard: dict[int, tuple[_Sign, float]] = {}
        self._report_at = stall_timeout
        self._failures_told: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self._listen()
                self._judge()
        except dist.DistError:
            logger.warning("the store of the job is gone, and with it the watchdog.")

    def _listen(self) -> None:
        ranks = range(self._coordinator.world_size)
        keys = {rank: f"{self._prefix}/{rank}" for rank in ranks}
        store = self._coordinator.store
        known = [rank for rank in ranks if rank in self._heard or store.check([keys[rank]])]
        now = time.monotonic()
        for rank, text in zip(known, store.multi_get([keys[rank] for rank in known]), strict=True):
            sign = _Sign(**json.loads(text))
            if rank not in self._heard or self._heard[rank][0].number != sign.number:
                self._heard[rank] = (sign, now)

    def _judge(self) -> None:
        statuses = tuple(self._status(rank) for rank in range(self._coordinator.world_size))
        failed = {status.rank for status in statuses if status.state == "failed"}
        seconds = max((s.age for s in statuses if s.state not in ("done", "failed")), default=0.0)
        if seconds < self._stall_timeout and self._report_at > self._stall_timeout:
            logger.info("progress again on every rank.")
            self._report_at = self._stall_timeout
        if seconds < self._report_at and failed <= self._failures_told:
            return
        if seconds >= self._report_at:
            # A stall that lasts is told again, ever more rarely.
            self._report_at = 2 * seconds
        self._failures_told |= failed
        report = StallReport(ranks=statuses, missing=find_missing(statuses), seconds=seconds)
        if active_recorder() is not None:
            self._ask_for_traces(report)
        logger.error("%s", report)
        if self._on_stall is not None:
            self._on_stall(report)

    def _ask_for_traces(self, report: StallReport) -> None:
        """Let each rank write its trace, and wait for those that can: `on_stall` may end the job."""
        store = self._coordinator.store
        store.set(f"{self._prefix}/stall", str(report).partition("\n")[0])
        waiting = {s.rank for s in report.ranks if s.state == "running"}
        deadline = time.monotonic() + max(_DUMP_SECONDS, 3 * self._interval)
        while waiting and time.monotonic() < deadline and not self._stop.wait(0.05):
            waiting = {rank for rank in waiting if not store.check([f"{self._prefix}/dumped/{rank}"])}

    def _status(self, rank: int) -> RankStatus:
        now = time.monotonic()
        if rank not in self._heard:
            return RankStatus(
                rank=rank,
                host=self._coordinator.host_of(rank),
                state="unknown",
                step=None,
                phase=None,
                order=0,
                age=now - self._started,
            )
        sign, when = self._heard[rank]
        state = sign.state
        if state == "running" and now - when > self._silent_after:
            state = "silent"
        return RankStatus(
            rank=rank,
            host=sign.host,
            state=state,
            step=sign.step,
            phase=sign.phase,
            order=sign.order,
            age=sign.age + now - when,
            error=sign.error,
            stack=tuple(sign.stack),
        )


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Where a rank was when it was last heard of.

    Attributes:
        rank: Global rank.
        host: Its host.
        state: `running`; `silent` (its process or host no longer publishes); `unknown` (never heard of);
            `failed`; `done`.
        step: Step of its last beat; None if never heard of.
        phase: Phase of its last beat; None if never heard of.
        order: How many beats came before in this step.
        age: Seconds since its last beat.
        error: What it failed with, if it did.
        stack: Innermost Python frames of the thread that beats, innermost last; empty while the beat is
            young.
    """

    rank: int
    host: str
    state: RankState
    step: int | None
    phase: str | None
    order: int
    age: float
    error: str | None = None
    stack: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the rank is inside a call that waits for other ranks."""
        return bool(self.stack) and any(place in self.stack[-1] for place in _WAITING_PLACES)


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """A stall as rank 0 sees it. `str(report)` is the text that is logged.

    Attributes:
        ranks: One status per rank.
        missing: The ranks that the others wait for; empty if all are at the same place.
        seconds: Seconds since the oldest last beat of a rank that is not done.
    """

    ranks: tuple[RankStatus, ...]
    missing: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        rows = [
            (
                status.rank,
                status.host,
                status.step,
                status.phase,
                f"{status.age:.1f} s ago",
                _state_text(status),
            )
            for status in self.ranks
        ]
        table = format_table(("rank", "host", "step", "phase", "last beat", "state"), rows, right=(0, 2, 4))
        return "\n".join([self._headline(), table, *self._stacks()])

    def _headline(self) -> str:
        named = [self.ranks[rank] for rank in self.missing]
        failed = [status for status in named if status.state == "failed"]
        if failed:
            return "; ".join(f"rank {s.rank} on {s.host} failed {_place(s)}: {s.error}" for s in failed)
        start = f"no progress for {self.seconds:.1f} s; "
        if not named:
            return start + f"all ranks are at the same place, {_place(self.ranks[0])}"
        return (
            start
            + "missing: "
            + "; ".join(f"rank {s.rank} on {s.host}, last seen {_place(s)}" for s in named)
        )

    def _stacks(self) -> list[str]:
        lines: list[str] = []
        for rank in self.missing or (0,):
            status = self.ranks[rank]
            if status.stack:
                lines.append(f"stack of rank {rank}, innermost call last:")
                lines.extend(f"  {frame}" for frame in status.stack)
        return lines


def find_missing(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """The ranks that the others wait for, by the strongest evidence there is.

    In this order: those that failed; those that are no longer or were never heard of; those that run
    something else while others wait in a collective; those that are behind in step and beats; those whose
    stack differs from that of the majority.

    Args:
        ranks: Status of every rank.

    Returns:
        Global ranks in order; empty if all are at the same place.
    """
    active = [status for status in ranks if status.state != "done"]
    failed = [status for status in active if status.state == "failed"]
    if failed:
        return _numbers(failed)
    gone = [status for status in active if status.state in ("silent", "unknown")]
    if gone:
        return _numbers(gone)
    if not active or len(active) == 1:
        return _numbers(active)
    busy = [status for status in active if not status.waits]
    if all(status.stack for status in active) and 0 < len(busy) < len(active):
        return _numbers(busy)
    least = min((status.step or 0, status.order) for status in active)
    behind = [status for status in active if (status.step or 0, status.order) == least]
    if len(behind) < len(active):
        return _numbers(behind)
    common, count = Counter(status.stack for status in active).most_common(1)[0]
    if count * 2 > len(active):
        return _numbers([status for status in active if status.stack != common])
    return ()


def _numbers(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(status.rank for status in statuses)


def _place(status: RankStatus) -> str:
    if status.step is None:
        return "never"
    return f"at step {status.step} in phase {status.phase!r}"


def _state_text(status: RankStatus) -> str:
    if status.state == "running":
        return "waiting for other ranks" if status.waits else "running"
    return {
        "silent": "no sign of life: process or host gone?",
        "unknown": "never heard of",
        "failed": f"failed: {status.error}",
        "done": "done",
    }[status.state]
