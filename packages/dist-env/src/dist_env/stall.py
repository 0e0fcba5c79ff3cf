"""What a stalled job looks like from rank 0, and whom it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dist_env.tables import format_table

RankState = Literal["running", "silent", "unknown", "failed", "done"]

# A thread whose innermost Python frame is here waits for other ranks.
_WAITING_PLACES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "dist_env/coordination.py",
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
