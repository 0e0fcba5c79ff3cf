"""The thread on rank 0 that reads the heartbeats of all ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from dist_env.coordination import Coordinator
from dist_env.logging import get_logger
from dist_env.stall import RankState, RankStatus, StallReport, find_missing

logger = get_logger("dist_env")

# A look at a store on a host that is gone may hang; ending the program does not wait for it.
_JOIN_SECONDS = 5.0


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
        logger.error("%s", report)
        if self._on_stall is not None:
            self._on_stall(report)

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
