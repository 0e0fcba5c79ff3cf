"""The steps of one rank's trace, each nanosecond of them attributed to exactly one category."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from .classify import (
    CATEGORIES,
    Category,
    Collective,
    collective_kind,
    collective_of_kernel,
    collective_of_span,
    kernel_category,
    operator_category,
    span_category,
    step_number,
)
from .sweep import NOTHING, Communication, Interval, Sweep, innermost, inside
from .trace_file import Event, TraceFile, TraceFileError, event_arguments

_Thread: TypeAlias = tuple[str, str]
"""Process and thread, as the trace names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """What one step of one rank was spent on.

    Attributes:
        number: As the profiler counts, or None where the trace has no steps and counts as one.
        start_ns: By this rank's clock.
        end_ns: Where the next step begins.
        nanoseconds: By category. They add up to the length of the step exactly.
        overlapped_ns: Communication behind computation; not in that sum.
    """

    number: int | None
    start_ns: int
    end_ns: int
    nanoseconds: Mapping[Category, int]
    overlapped_ns: int

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def shares(self) -> dict[Category, float]:
        """By category, as a share of the step."""
        return shares_of(self.nanoseconds)


def shares_of(nanoseconds: Mapping[Category, int]) -> dict[Category, float]:
    """Times as shares of their sum; all 0 where that is 0."""
    total = sum(nanoseconds.values())
    return {name: nanoseconds.get(name, 0) / total if total else 0.0 for name in CATEGORIES}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """The steps that one rank recorded.

    Attributes:
        rank: From the trace, or else from the file's name; None if neither tells.
        host: The name of its host, or None if the trace does not tell. Ranks of one host have one clock.
        path: The file.
        on_device: Whether the trace has kernels of an accelerator. If not, operators of the main thread
            are what computes.
        steps: In their order.
        communications: All of them, by their start.
        outside_ns: Work that lies outside of every step.
    """

    rank: int | None
    host: str | None
    path: Path
    on_device: bool
    steps: tuple[StepBreakdown, ...]
    communications: tuple[Communication, ...]
    outside_ns: int


def read_steps(path: str | Path) -> RankSteps:
    """Read what the steps of one rank were spent on.

    A step is a `ProfilerStep#n` annotation, up to the next; the last one also has what the device still had
    to do. A trace without them counts as one step. At each instant the first of these counts:

    - on an accelerator: a kernel for matrix multiplication, for attention, another kernel, communication, a
      copy, an open checkpoint or data wait of the main thread, and the rest is host gap;
    - on a CPU: an open checkpoint or data wait of the main thread, the innermost operator there,
      communication, and the rest is host gap.

    Args:
        path: What `prof.export_chrome_trace` wrote, packed by gzip or not.

    Raises:
        TraceFileError: It is no such file, or has no events with a time.
        OSError: It cannot be read.
    """
    file = TraceFile(path)
    reader = StepReader()
    for event in file.events():
        reader.add(event)
    return reader.steps(file)


class _Spans:
    """Intervals of one thread, in 17 bytes each: a trace may have millions of operators."""

    def __init__(self) -> None:
        self.starts, self.ends, self.kinds = array("q"), array("q"), array("b")

    def add(self, start: int, end: int, kind: int) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.kinds.append(kind)

    def intervals(self) -> Iterable[Interval]:
        """In the order in which they were added."""
        return zip(self.starts, self.ends, self.kinds, strict=True)


class _Annotation(NamedTuple):
    number: int
    start: int
    end: int
    thread: _Thread


_LONGEST_US = 2**62 // 1000
"""Nanoseconds are kept in 64 bits."""
_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
# Operators that are none, but show when the communication of a backend without annotations was asked for.
_LAUNCH = re.compile(r"c10d::(\w+)")


class StepReader:
    """Takes the events of a trace one by one, so that one pass over a file can feed several readers."""

    def __init__(self) -> None:
        self._annotations: list[_Annotation] = []
        self._kernels: list[Interval] = []
        self._communications: list[tuple[Communication, object]] = []
        self._launches: list[tuple[Communication, object]] = []
        self._operators: defaultdict[_Thread, _Spans] = defaultdict(_Spans)
        self._spans: defaultdict[_Thread, list[Interval]] = defaultdict(list)
        self._on_device = False

    def add(self, event: Event) -> None:
        """Take the next event."""
        times = _times(event)
        if times is None or event.get("ph", "X") != "X":
            return
        start, end = times
        category, name = str(event.get("cat")), str(event.get("name", ""))
        if category == "kernel":
            self._add_kernel(event, name, start, end)
        elif category in _COPIES:
            self._on_device = True
            self._kernels.append((start, end, CATEGORIES.index("memory_copies")))
        elif category == "user_annotation":
            self._add_annotation(event, name, start, end)
        elif category == "cpu_op":
            self._add_operator(event, name, start, end)

    def _add_kernel(self, event: Event, name: str, start: int, end: int) -> None:
        if not self._on_device:
            self._on_device = True
            self._operators.clear()  # what the device does counts, not the operators that asked for it
        arguments = event_arguments(event)
        kind = kernel_category(name)
        if kind == "exposed_communication" or arguments.get("Collective name"):
            told = Communication(collective_of_kernel(event), start, end)
            self._communications.append((told, arguments.get("Process Group Name")))
        else:
            self._kernels.append((start, end, CATEGORIES.index(kind)))

    def _add_annotation(self, event: Event, name: str, start: int, end: int) -> None:
        thread = _thread(event)
        number = step_number(name)
        if number is not None:
            self._annotations.append(_Annotation(number, start, end, thread))
        elif (collective := collective_of_span(name)) is not None:
            self._communications.append((Communication(collective, start, end), None))
        elif (span := span_category(name)) is not None:
            self._spans[thread].append((start, end, CATEGORIES.index(span)))

    def _add_operator(self, event: Event, name: str, start: int, end: int) -> None:
        thread = _thread(event)
        if (span := span_category(name)) is not None:
            self._spans[thread].append((start, end, CATEGORIES.index(span)))
            return
        if self._on_device:
            return
        kind = operator_category(name)
        self._operators[thread].add(start, end, NOTHING if kind is None else CATEGORIES.index(kind))
        if launch := _LAUNCH.match(name):
            collective = Collective(collective_kind(launch[1]))
            self._launches.append((Communication(collective, start, end), None))

    def steps(self, file: TraceFile) -> RankSteps:
        """What the steps were spent on.

        Args:
            file: The trace, after its last event.

        Raises:
            TraceFileError: No event had a time.
        """
        shift = _base_time(file.header)
        thread = self._main_thread()
        spans = [] if thread is None else self._spans[thread]
        communications = self._all_communications(file.header)
        if self._on_device:
            busy = [*self._kernels, *spans]
        else:
            operators = self._operators.get(thread) if thread is not None else None
            busy = innermost([*(operators.intervals() if operators else ()), *spans])
        busy = [(start, end, kind) for start, end, kind in busy if end > start]
        windows = self._windows(busy, communications)
        if not windows:
            raise TraceFileError(f"{file.path} has no events with a time, so its steps cannot be read.")
        covered = inside(spans, communications) if self._on_device else set()
        sweep = Sweep([(start, end) for _, start, end in windows], on_device=self._on_device)
        sweep.run(busy, communications, covered)
        _set_steps(communications, windows)
        for each in communications:
            each.start, each.end = each.start + shift, each.end + shift
            each.exposed = [(start + shift, end + shift) for start, end in each.exposed]
        return RankSteps(
            rank=_rank(file),
            host=host if isinstance(host := file.header.get("host_name"), str) and host else None,
            path=file.path,
            on_device=self._on_device,
            steps=tuple(
                StepBreakdown(
                    number=number,
                    start_ns=start + shift,
                    end_ns=end + shift,
                    nanoseconds=dict(zip(CATEGORIES, sums, strict=True)),
                    overlapped_ns=overlapped,
                )
                for (number, start, end), sums, overlapped in zip(
                    windows, sweep.sums, sweep.overlapped, strict=True
                )
            ),
            communications=tuple(communications),
            outside_ns=sweep.outside,
        )

    def _main_thread(self) -> _Thread | None:
        """The thread that steps the profiler, or else the one with the most operators."""
        if self._annotations:
            return self._annotations[0].thread
        counts = {thread: len(spans.kinds) for thread, spans in self._operators.items()}
        counts |= {thread: len(spans) for thread, spans in self._spans.items() if thread not in counts}
        return max(counts, key=counts.__getitem__, default=None)

    def _all_communications(self, header: Event) -> list[Communication]:
        """In the order of their starts, each with the ranks that take part where the header has them."""
        found = self._communications or ([] if self._on_device else self._launches)
        members = _group_members(header)
        for each, group in found:
            if each.collective.ranks is None and str(group) in members:
                each.collective = each.collective._replace(ranks=members[str(group)])
        return sorted((each for each, _ in found), key=lambda each: (each.start, each.end))

    def _windows(
        self, busy: Sequence[Interval], communications: Sequence[Communication]
    ) -> list[tuple[int | None, int, int]]:
        """Number, start and end of each step: without gaps between steps that follow one another."""
        if not self._annotations:
            work = [(start, end) for start, end, _ in busy]
            work += [(one.start, one.end) for one in communications]
            if not work:
                return []
            return [(None, min(start for start, _ in work), max(end for _, end in work))]
        # Those of one thread: steps of another profiler, or of a second loop, would lie across them.
        thread = self._annotations[0].thread
        own = {each for each in self._annotations if each.thread == thread}
        annotations = sorted(own, key=lambda each: each.start)
        last = annotations[-1]
        end = last.end
        if self._on_device:
            # The host runs ahead: what it has launched by the end of the last step is part of that step.
            end = max([end, *(stop for _, stop, _ in self._kernels), *(one.end for one in communications)])
        windows: list[tuple[int | None, int, int]] = []
        for each, following in pairwise(annotations):
            # Between two captures of one profiler lie steps that were not recorded.
            adjacent = following.number == each.number + 1
            until = following.start if adjacent else min(each.end, following.start)
            windows.append((each.number, each.start, until))
        return [*windows, (last.number, last.start, max(end, last.start))]


def _set_steps(
    communications: Iterable[Communication], windows: Sequence[tuple[int | None, int, int]]
) -> None:
    """Give each communication the step in which it began, or else the first that it reaches into."""
    starts = [start for _, start, _ in windows]
    for each in communications:
        place = bisect_right(starts, each.start) - 1
        if place < 0 or each.start >= windows[place][2]:
            place += 1
        each.step = place if place < len(windows) and each.end > starts[place] else None


def _thread(event: Event) -> _Thread:
    return str(event.get("pid")), str(event.get("tid"))


def _times(event: Event) -> tuple[int, int] | None:
    """Start and end in nanoseconds; None for an event without them."""
    start, length = event.get("ts"), event.get("dur")
    if not isinstance(start, int | float) or not isinstance(length, int | float):
        return None
    if not (-_LONGEST_US < start < _LONGEST_US and -_LONGEST_US < length < _LONGEST_US):
        return None  # nor for one that no clock shows, nan among them
    begin = start * 1000 if isinstance(start, int) else round(start * 1000)
    return begin, begin + max(0, round(length * 1000))


def _base_time(header: Event) -> int:
    """What newer traces leave out of their times, so that those of several ranks can be compared."""
    base = header.get("baseTimeNanoseconds")
    return base if isinstance(base, int) else 0


def _group_members(header: Event) -> dict[str, tuple[int, ...]]:
    """Ranks of the process groups, by name."""
    information = header.get("distributedInfo")
    groups = information.get("pg_config") if isinstance(information, dict) else None
    return {
        str(group.get("pg_name")): tuple(group["ranks"])
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, dict)
        and isinstance(group.get("ranks"), list)
        and all(type(rank) is int for rank in group["ranks"])
    }


def _rank(file: TraceFile) -> int | None:
    information = file.header.get("distributedInfo")
    rank = information.get("rank") if isinstance(information, dict) else None
    if type(rank) is int:
        return rank
    match = re.search(r"rank[-_]?(\d+)", file.path.name)
    return int(match[1]) if match else None
