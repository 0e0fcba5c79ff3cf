"""Steps side by side over ranks: who waits for whom, who is late, and what is lost most."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

from .classify import (
    CATEGORIES,
    POINT_TO_POINT,
    SYNCHRONIZING,
    Category,
    Collective,
)
from .steps import RankSteps, StepBreakdown, read_steps, shares_of
from .sweep import Communication
from .trace_file import TraceFileError

_StepKey: TypeAlias = tuple[str, int | None, int]
"""Which capture, the number of the step in it, and how often that was there before."""
_LEAST_NAMED = 0.01
"""Waiting below this share of a step has no culprit that is worth a name."""
_LONGEST_CHAIN = 64
"""So many ranks wait for one another at most before the blame stays where it is."""
_NAMES_IN_NOTE = 8


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """One kind of communication over one process group, summed over the steps of a rank.

    Attributes:
        collective: What it is.
        calls: How often.
        waiting_ns: Exposed, while another rank had not yet begun. 0 if only one rank was read.
        transfer_ns: The rest of what is exposed.
        overlapped_ns: Behind computation.
    """

    collective: Collective
    calls: int
    waiting_ns: int
    transfer_ns: int
    overlapped_ns: int

    @property
    def exposed_ns(self) -> int:
        """Time in which the step had nothing else to do."""
        return self.waiting_ns + self.transfer_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBreakdown:
    """What one rank spent its steps on.

    Attributes:
        rank: Which.
        on_device: Whether kernels of an accelerator were traced, or operators of a CPU.
        steps: Those that are compared.
        nanoseconds: By category, summed over the steps; their sum is the length of the steps exactly.
        waiting_ns: By the rank that was waited for in the end; part of the exposed communication.
        communications: By kind and group, the most exposed first.
        overlapped_ns: Communication behind computation; not in the sum.
        outside_ns: Work that the trace has outside of every step.
    """

    rank: int
    on_device: bool
    steps: tuple[StepBreakdown, ...]
    nanoseconds: Mapping[Category, int]
    waiting_ns: Mapping[int, int]
    communications: tuple[CommunicationTime, ...]
    overlapped_ns: int
    outside_ns: int

    @property
    def total_ns(self) -> int:
        """Length of the steps."""
        return sum(self.nanoseconds.values())

    @property
    def shares(self) -> dict[Category, float]:
        """By category, as a share of the steps."""
        return shares_of(self.nanoseconds)

    def share(self, nanoseconds: float) -> float:
        """A time as a share of the steps."""
        return nanoseconds / self.total_ns if self.total_ns else 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that others wait for.

    Attributes:
        rank: Which.
        waiting_share: What the other ranks wait for it on average, as a share of their steps.
        category: What it spends more on than the others.
        share: That category, as a share of its own steps.
        others_share: The same on the other ranks, on average.
    """

    rank: int
    waiting_share: float
    category: Category
    share: float
    others_share: float


@dataclass(frozen=True, slots=True)
class TraceBreakdown:
    """What the steps were spent on, rank by rank.

    Attributes:
        ranks: In their order.
        straggler: The rank that causes at least half of the waiting, or None.
        clock_offsets_ns: By rank, what its host's clock is ahead of the first's, from ends of collectives.
        notes: What could not be compared, in sentences.
    """

    ranks: tuple[RankBreakdown, ...]
    straggler: Straggler | None
    clock_offsets_ns: Mapping[int, int]
    notes: tuple[str, ...]


def read_breakdown(paths: str | Path | Sequence[str | Path]) -> TraceBreakdown:
    """Read the traces of one or all ranks, and compare their steps.

    Steps are those that every rank has. A collective is the same on several ranks if it is the k-th of its
    kind and group in the step. Clocks of different hosts are set by the ends of collectives that no rank can
    end before all have begun. The rank that begins a collective last is the one that the others wait for; if
    it waits itself meanwhile, they wait for the rank that it waits for.

    Args:
        paths: Files, or a directory with one file for each rank, such as the `profile/` of a run.

    Raises:
        TraceFileError: A file is not a trace, or a directory has none.
        OSError: A file cannot be read.
    """
    return compare_ranks([read_steps(path) for path in trace_paths(paths)])


def trace_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files, with each directory replaced by the traces in it, or in its `profile/`.

    Raises:
        TraceFileError: A directory has no traces.
    """
    found: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        if not path.is_dir():
            found.append(path)
            continue
        folder = path / "profile" if (path / "profile").is_dir() else path
        files = sorted(file for file in folder.iterdir() if file.name.endswith((".json", ".json.gz")))
        if not files:
            raise TraceFileError(
                f"{folder} has no traces, which end in .json or .json.gz. Record them with ProfilerCallback "
                "or torch.profiler."
            )
        found += files
    # A file that is given by itself and by its folder is one.
    return list({path.resolve(): path for path in found}.values())


def compare_ranks(traces: Sequence[RankSteps]) -> TraceBreakdown:
    """Compare what was read; a rank may have several traces, of one capture each.

    Raises:
        TraceFileError: No trace was given.
    """
    if not traces:
        raise TraceFileError("No trace was given. Give the files of one or all ranks.")
    notes: list[str] = []
    by_rank = _by_rank(traces, notes)
    steps = {rank: _steps_of(files) for rank, files in by_rank.items()}
    common = set.intersection(*(set(of_rank) for of_rank in steps.values()))
    if not common:
        notes.append("No step is in the traces of all ranks, so steps are not aligned.")
    elif left_out := sum(len(of_rank) - len(common) for of_rank in steps.values()):
        notes.append(f"{left_out} steps that are not in the traces of all ranks are left out.")
    chosen = {
        rank: {key: step for key, step in of_rank.items() if key in common or not common}
        for rank, of_rank in steps.items()
    }
    calls = {rank: _calls(files, chosen[rank]) for rank, files in by_rank.items()}
    matches, unmatched = _matches(calls)
    if unmatched:
        notes.append(
            f"{unmatched} collectives could not be matched over ranks, because their numbers in a step "
            "differ: waiting in them counts as transfer."
        )
    if missing := sorted(_named_ranks(calls) - set(by_rank)):
        names = ", ".join(map(str, missing[:_NAMES_IN_NOTE])) + (
            " and more" if len(missing) > _NAMES_IN_NOTE else ""
        )
        notes.append(f"Traces of ranks {names} are missing: waiting for them counts as transfer.")
    offsets = _clock_offsets(matches, by_rank)
    waiting = _Waiting(offsets)
    for match in matches:
        waiting.add(match)
    waiting.resolve()
    waiting.add_point_to_point(calls)
    ranks = tuple(
        _rank_breakdown(rank, files, tuple(chosen[rank].values()), calls[rank], waiting)
        for rank, files in by_rank.items()
    )
    return TraceBreakdown(ranks, _straggler(ranks), offsets, tuple(notes))


def _by_rank(traces: Sequence[RankSteps], notes: list[str]) -> dict[int, list[RankSteps]]:
    found: defaultdict[int, list[RankSteps]] = defaultdict(list)
    for trace in traces:
        if trace.rank is not None:
            found[trace.rank].append(trace)
    unnamed = [trace for trace in traces if trace.rank is None]
    if unnamed and len(traces) > 1:
        notes.append(f"{len(unnamed)} traces do not tell their rank, and were numbered in their order.")
    number = 0
    for trace in unnamed:
        while number in found:
            number += 1
        found[number].append(trace)
    in_order = {rank: sorted(found[rank], key=lambda trace: trace.path.name) for rank in sorted(found)}
    for rank, files in in_order.items():
        captures = [_capture(trace, place) for place, trace in enumerate(files)]
        twice = next((each for place, each in enumerate(captures) if each in captures[:place]), None)
        if twice is not None:
            paths = " and ".join(
                str(trace.path) for trace, each in zip(files, captures, strict=True) if each == twice
            )
            raise TraceFileError(
                f"Rank {rank} has several traces of one capture: {paths}. Give those of one run, each once."
            )
    return in_order


def _capture(trace: RankSteps, place: int) -> str:
    """What the traces of one capture have in common: their name without the rank, or their place."""
    name, ranks = re.subn(r"rank[-_]?\d+", "", trace.path.name)
    return name if ranks else str(place)


def _steps_of(files: Sequence[RankSteps]) -> dict[_StepKey, StepBreakdown]:
    return {
        key: step
        for place, trace in enumerate(files)
        for key, step in zip(_keys(trace, place), trace.steps, strict=True)
    }


def _keys(trace: RankSteps, place: int) -> list[_StepKey]:
    """What names each step of a trace over ranks; a number that comes again is another step."""
    capture, seen, keys = _capture(trace, place), Counter[int | None](), []
    for step in trace.steps:
        keys.append((capture, step.number, seen[step.number]))
        seen[step.number] += 1
    return keys


class _Call(NamedTuple):
    """A communication, and where it is to be looked for on other ranks."""

    step: _StepKey
    communication: Communication


def _calls(files: Sequence[RankSteps], chosen: Mapping[_StepKey, StepBreakdown]) -> list[_Call]:
    found = []
    for place, trace in enumerate(files):
        keys = _keys(trace, place)
        found += [
            _Call(keys[each.step], each)
            for each in trace.communications
            if each.step is not None and keys[each.step] in chosen
        ]
    return found


def _named_ranks(calls: Mapping[int, Sequence[_Call]]) -> set[int]:
    """The ranks that take part in communication, as far as traces tell."""
    groups = {call.communication.collective.ranks for of_rank in calls.values() for call in of_rank}
    return {rank for ranks in groups if ranks is not None for rank in ranks}


_Match: TypeAlias = Mapping[int, Communication]
"""The same collective, by rank."""


def _matches(calls: Mapping[int, Sequence[_Call]]) -> tuple[list[_Match], int]:
    """The same collectives over ranks, and how many could not be matched."""
    series: defaultdict[tuple[_StepKey, Collective], dict[int, list[Communication]]] = defaultdict(dict)
    for rank, of_rank in calls.items():
        for step, communication in of_rank:
            if communication.collective.kind not in POINT_TO_POINT:
                series[step, communication.collective].setdefault(rank, []).append(communication)
    matches: list[_Match] = []
    unmatched = 0
    for (_, collective), by_rank in series.items():
        if collective.ranks is not None:
            by_rank = {rank: found for rank, found in by_rank.items() if rank in collective.ranks}
        if len(by_rank) < 2:
            continue
        counts = {len(found) for found in by_rank.values()}
        if len(counts) > 1:
            unmatched += max(counts)
            continue
        ranks = list(by_rank)
        matches += (
            dict(zip(ranks, together, strict=True)) for together in zip(*by_rank.values(), strict=True)
        )
    return matches, unmatched


def _clock_offsets(matches: Iterable[_Match], by_rank: Mapping[int, Sequence[RankSteps]]) -> dict[int, int]:
    """What each clock is ahead of the first rank's.

    Hosts that share no collective with its host are set by way of others that do; those without any stay as
    they are.
    """
    # Ranks of which the host is not known have a clock each.
    clocks: dict[int, str | int] = {rank: files[0].host or rank for rank, files in by_rank.items()}
    differences: defaultdict[tuple[str | int, str | int], list[int]] = defaultdict(list)
    for match in matches:
        first, *others = match
        if match[first].collective.kind not in SYNCHRONIZING:
            continue
        # Against the first member alone: pairs of all would grow with the square of the ranks.
        for other in others:
            if clocks[first] != clocks[other]:
                differences[clocks[first], clocks[other]].append(match[other].end - match[first].end)
    offsets: dict[str | int, int] = {next(iter(clocks.values())): 0}
    while True:
        known = len(offsets)
        for (one, other_clock), found in differences.items():
            if one in offsets and other_clock not in offsets:
                offsets[other_clock] = offsets[one] + round(median(found))
            elif other_clock in offsets and one not in offsets:
                offsets[one] = offsets[other_clock] - round(median(found))
        if len(offsets) == known:
            return {rank: offsets.get(clock, 0) for rank, clock in clocks.items()}


class _Wait(NamedTuple):
    """Exposed time in which a rank waits for one that has not begun a collective, by the first clock."""

    start: int
    end: int
    culprit: int
    collective: Collective


class _Waiting:
    """Time in which a rank waits for another, by rank and by kind of communication."""

    def __init__(self, offsets: Mapping[int, int]) -> None:
        self._offsets = offsets
        self._waits: defaultdict[int, list[_Wait]] = defaultdict(list)
        self.by_culprit: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.by_collective: defaultdict[int, defaultdict[Collective, int]] = defaultdict(
            lambda: defaultdict(int)
        )

    def add(self, match: _Match) -> None:
        """Add what the ranks wait in one collective for the one that begins it last."""
        begun = {rank: each.start - self._offsets[rank] for rank, each in match.items()}
        for rank, each in match.items():
            offset = self._offsets[rank]
            # A rank that begins when it is over here is in another group: gloo does not tell groups apart.
            end = each.end - offset
            last = max((other for other in begun if begun[other] <= end), key=begun.__getitem__, default=rank)
            if last == rank:
                continue
            for start, stop in each.exposed:
                until = min(stop - offset, begun[last])
                if until > start - offset:
                    self._waits[rank].append(_Wait(start - offset, until, last, each.collective))

    def resolve(self) -> None:
        """Add up, and blame the rank at the root: who waits for a rank that waits itself, waits for a third.

        With replicas of shards, one late rank delays its shard group, and that all others.
        """
        for waits in self._waits.values():
            waits.sort()
        for rank, waits in self._waits.items():
            for wait in waits:
                self.by_collective[rank][wait.collective] += wait.end - wait.start
                self._blame(rank, wait.culprit, wait.start, wait.end, frozenset({rank}))

    def _blame(self, rank: int, culprit: int, start: int, end: int, seen: frozenset[int]) -> None:
        # A chain of more ranks is cut: who is at its end is not the rank to look at first.
        waits = self._waits.get(culprit, []) if len(seen) < _LONGEST_CHAIN else []
        place = bisect_right(waits, start, key=lambda wait: wait.end)
        for wait in waits[place:]:
            if wait.start >= end:
                break
            if wait.culprit in seen or wait.culprit == culprit:
                continue
            overlap_start, overlap_end = max(start, wait.start), min(end, wait.end)
            self.by_culprit[rank][culprit] += max(0, overlap_start - start)
            self._blame(rank, wait.culprit, overlap_start, overlap_end, seen | {culprit})
            start = overlap_end
        self.by_culprit[rank][culprit] += end - start

    def add_point_to_point(self, calls: Mapping[int, Sequence[_Call]]) -> None:
        """Add what stages of a pipeline wait for the slowest.

        Traces do not tell which send belongs to which receive. The stage that waits least is the one that
        sets the pace: what others wait more than it does is waiting for it, the rest is transfer, and the
        bubble that all stages have.
        """
        exposed: dict[int, Mapping[Collective, int]] = {}
        for rank, of_rank in calls.items():
            sums: defaultdict[Collective, int] = defaultdict(int)
            for _, each in of_rank:
                if each.collective.kind in POINT_TO_POINT:
                    sums[each.collective] += each.exposed_ns
            if sums:
                exposed[rank] = sums
        if len(exposed) < 2:
            return
        slowest = min(exposed, key=lambda rank: sum(exposed[rank].values()))
        least = sum(exposed[slowest].values())
        for rank, times in exposed.items():
            total = sum(times.values())
            for collective, time in times.items():
                waited = time * (total - least) // total if total else 0
                if waited:
                    self.by_culprit[rank][slowest] += waited
                    self.by_collective[rank][collective] += waited


def _rank_breakdown(
    rank: int,
    files: Sequence[RankSteps],
    steps: tuple[StepBreakdown, ...],
    calls: Sequence[_Call],
    waiting: _Waiting,
) -> RankBreakdown:
    grouped: defaultdict[Collective, list[Communication]] = defaultdict(list)
    for _, each in calls:
        grouped[each.collective].append(each)
    communications = []
    for collective, found in grouped.items():
        waited = waiting.by_collective[rank][collective]
        exposed = sum(each.exposed_ns for each in found)
        overlapped = sum(each.overlapped_ns for each in found)
        communications.append(CommunicationTime(collective, len(found), waited, exposed - waited, overlapped))
    communications.sort(key=lambda each: (-each.exposed_ns, -each.overlapped_ns))
    return RankBreakdown(
        rank=rank,
        on_device=any(trace.on_device for trace in files),
        steps=steps,
        nanoseconds={name: sum(step.nanoseconds[name] for step in steps) for name in CATEGORIES},
        waiting_ns=dict(sorted(waiting.by_culprit[rank].items())),
        communications=tuple(communications),
        overlapped_ns=sum(step.overlapped_ns for step in steps),
        outside_ns=sum(trace.outside_ns for trace in files),
    )


def _straggler(ranks: Sequence[RankBreakdown]) -> Straggler | None:
    shares: defaultdict[int, float] = defaultdict(float)
    for one in ranks:
        for culprit, waited in one.waiting_ns.items():
            shares[culprit] += one.share(waited) / (len(ranks) - 1)
    worst = max(shares, key=shares.__getitem__, default=None)
    if worst is None or shares[worst] < max(_LEAST_NAMED, sum(shares.values()) / 2):
        return None
    own = next(one for one in ranks if one.rank == worst).shares
    others = [one.shares for one in ranks if one.rank != worst]
    mean = {name: sum(each[name] for each in others) / len(others) for name in CATEGORIES}
    cause = max(
        (name for name in CATEGORIES if name != "exposed_communication"),
        key=lambda name: own[name] - mean[name],
    )
    return Straggler(worst, shares[worst], cause, own[cause], mean[cause])
