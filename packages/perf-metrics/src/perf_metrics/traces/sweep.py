"""Attributes every nanosecond of a step to exactly one category."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from .classify import CATEGORIES, Collective

# Times are whole nanoseconds: sums of floats would not add up to the length of a step exactly.

_HOST_GAP = CATEGORIES.index("host_gap")
_EXPOSED = CATEGORIES.index("exposed_communication")

Interval: TypeAlias = tuple[int, int, int]
"""Start, end, and what it is: an index of `CATEGORIES`."""


@dataclass(slots=True)
class Communication:
    """One collective, send or receive on one rank, in nanoseconds of this rank's clock.

    Attributes:
        collective: What it is.
        start: When this rank entered it.
        end: When it was complete here.
        step: Index of the step in which it began, or that it reaches into; None outside of steps.
        exposed: The intervals in which the step had nothing else to do.
        overlapped_ns: The time in which something else ran.
    """

    collective: Collective
    start: int
    end: int
    step: int | None = None
    exposed: list[tuple[int, int]] = field(default_factory=list)
    overlapped_ns: int = 0

    @property
    def exposed_ns(self) -> int:
        """The sum of the exposed intervals."""
        return sum(end - start for start, end in self.exposed)


_HIDES_COMMUNICATION = frozenset(
    CATEGORIES.index(name) for name in ("matmul", "attention", "other_kernels", "memory_copies")
)
"""What communication overlaps with. Within a save or a wait for data it is part of that."""
_EDGE = 2
"""A point at which a step begins or ends, beside 1 for starts and 0 for ends of intervals."""

NOTHING = -1
"""The kind of an operator that computes nothing by itself."""


class Sweep:
    """Goes through all starts and ends in the order of time, and adds up what each instant is spent on."""

    def __init__(self, windows: Sequence[tuple[int, int]], *, on_device: bool) -> None:
        self._windows = windows
        self._starts = [start for start, _ in windows]
        spans = [CATEGORIES.index("checkpoint"), CATEGORIES.index("data_wait")]
        kernels = [CATEGORIES.index(name) for name in ("matmul", "attention", "other_kernels")]
        copies = [CATEGORIES.index("memory_copies")]
        # On a CPU a span covers the operators in it, and the communication that it waits for.
        self._before = kernels if on_device else [*spans, *kernels]
        self._after = [*copies, *spans] if on_device else copies
        self.sums = [[0] * len(CATEGORIES) for _ in windows]
        self.overlapped = [0] * len(windows)
        self.outside = 0

    def run(
        self, busy: Sequence[Interval], communications: Sequence[Communication], covered: set[int]
    ) -> None:
        """Add up.

        Args:
            busy: What computes, copies or is an open span.
            communications: Get their exposed intervals and overlapped time.
            covered: Indices of communications that are part of an open span, which counts in their place.
        """
        # Ends come before starts of the same time, so that what follows is never beside what went before.
        points: list[tuple[int, int, int, int]] = []
        for start, end, kind in busy:
            points += ((start, 1, kind, -1), (end, 0, kind, -1))
        for index, each in enumerate(communications):
            if each.end > each.start:
                points += ((each.start, 1, _EXPOSED, index), (each.end, 0, _EXPOSED, index))
        edges = sorted({edge for window in self._windows for edge in window})
        points += ((edge, _EDGE, _HOST_GAP, -1) for edge in edges)
        points.sort()
        open_counts = [0] * len(CATEGORIES)
        active: dict[int, None] = {}
        before = points[0][0] if points else 0
        for time, what, kind, index in points:
            if time > before:
                chosen, exposed = self._choose(open_counts, active, covered)
                place = self._place(before)
                if place is None:
                    self.outside += time - before if chosen != _HOST_GAP else 0
                else:
                    self.sums[place][chosen] += time - before
                if place is not None and exposed is not None:
                    _extend(communications[exposed].exposed, before, time)
                if place is not None and active and chosen in _HIDES_COMMUNICATION:
                    self.overlapped[place] += time - before
                    # Of several at once one, as for exposed time: their sum is the time of the network.
                    communications[next(iter(active))].overlapped_ns += time - before
                before = time
            if index >= 0 and what == 1:
                active[index] = None
            elif index >= 0:
                del active[index]
            elif what != _EDGE:
                open_counts[kind] += 1 if what == 1 else -1

    def _place(self, time: int) -> int | None:
        """Index of the step at a time; None outside of all."""
        place = bisect_right(self._starts, time) - 1
        return place if place >= 0 and time < self._windows[place][1] else None

    def _choose(
        self, open_counts: list[int], active: dict[int, None], covered: set[int]
    ) -> tuple[int, int | None]:
        """What counts now, and of communication, which."""
        for kind in self._before:
            if open_counts[kind]:
                return kind, None
        for index in active:
            if index not in covered:
                return _EXPOSED, index
        for kind in self._after:
            if open_counts[kind]:
                return kind, None
        return _HOST_GAP, None


def _extend(intervals: list[tuple[int, int]], start: int, end: int) -> None:
    if intervals and intervals[-1][1] == start:
        intervals[-1] = (intervals[-1][0], end)
    else:
        intervals.append((start, end))


def innermost(spans: Sequence[Interval]) -> list[Interval]:
    """Of nested intervals of one thread, the parts in which each is the innermost.

    Attention and the spans of a loop cover what they call. An operator that computes nothing by itself leaves
    a hole, in which the main thread waits, or runs Python.
    """
    covering = {CATEGORIES.index(name) for name in ("attention", "checkpoint", "data_wait")}
    found: list[Interval] = []
    stack: list[tuple[int, int]] = []
    now = 0

    def go_to(time: int) -> None:
        nonlocal now
        if stack and time > now and stack[-1][1] != NOTHING:
            found.append((now, time, stack[-1][1]))
        now = max(now, time)

    for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1][0] <= start:
            go_to(stack[-1][0])
            stack.pop()
        go_to(start)
        if stack:
            # Ends are rounded, so that a child may seem to outlast its parent.
            end = min(end, stack[-1][0])
            kind = stack[-1][1] if stack[-1][1] in covering else kind
        stack.append((end, kind))
    while stack:
        go_to(stack[-1][0])
        stack.pop()
    return found


def inside(spans: Sequence[Interval], communications: Sequence[Communication]) -> set[int]:
    """Indices of communications that began within a span: agreements of ranks in the course of a save."""
    ordered = sorted(spans)
    starts = [start for start, _, _ in ordered]
    # Spans may lie within spans: the last end of all that have begun.
    ends = list(accumulate((end for _, end, _ in ordered), max))
    return {
        index
        for index, each in enumerate(communications)
        if (place := bisect_right(starts, each.start) - 1) >= 0 and each.start < ends[place]
    }
