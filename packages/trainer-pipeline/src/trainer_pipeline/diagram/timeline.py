"""When each rank computes what, and how long it waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .table import KINDS, Kind


@dataclass(frozen=True, slots=True)
class Bar:
    """One pass of one microbatch through one stage, with its time.

    Args:
        rank: The rank that computes.
        stage: Number of the stage in the pipeline.
        kind: "F" forward, "B" full backward, "I" backward for the inputs, "W" backward for the weights.
        microbatch: Number of the microbatch.
        start: Begin, in the unit of the timeline.
        end: End, in the unit of the timeline.
    """

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Time from begin to end."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What the ranks of a pipeline compute in one step, and when: predicted, or measured.

    Args:
        schedule: Name of the schedule.
        bars: What is computed, in any order. Every rank has at least one bar.
        unit: What times are given in; predictions count in forward passes of one microbatch through all the
            stages of one rank.

    Raises:
        ValueError: There are no bars, a bar ends before it begins, or a rank has none.
    """

    schedule: str
    bars: tuple[Bar, ...]
    unit: str = "forward passes of a rank"

    def __post_init__(self) -> None:
        if not self.bars:
            raise ValueError("bars=() must have at least one bar. Give what the ranks computed.")
        for bar in self.bars:
            if bar.end < bar.start:
                raise ValueError(f"{bar} ends before it begins. Give its end in the clock of its begin.")
        missing = set(range(self.ranks)) - {bar.rank for bar in self.bars}
        if missing:
            raise ValueError(f"bars has none of rank {min(missing)}. Give those of all {self.ranks} ranks.")

    @classmethod
    def of_work(
        cls, schedule: str, work: Sequence[Iterable[tuple[int, str, int, float, float]]], unit: str = "s"
    ) -> Timeline:
        """Return the timeline of what was measured.

        Args:
            schedule: Name of the schedule.
            work: For each rank what it did: stage, kind ("F", "B", "I" or "W"), microbatch, start, end.
                All ranks count from the same moment.
            unit: The unit of start and end.

        Raises:
            ValueError: There is another kind, or what the class itself raises.
        """
        bars = [Bar(rank, *_checked(part)) for rank, parts in enumerate(work) for part in parts]
        return cls(schedule, tuple(bars), unit)

    @cached_property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return 1 + max(bar.rank for bar in self.bars)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of the step."""
        return len({bar.microbatch for bar in self.bars})

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in the order in which a microbatch comes through them."""
        found: dict[int, set[int]] = defaultdict(set)
        for bar in self.bars:
            found[bar.rank].add(bar.stage)
        return tuple(tuple(sorted(found[rank])) for rank in range(self.ranks))

    @cached_property
    def stages_per_rank(self) -> int:
        """Stages of the rank that holds most of them."""
        return max(len(stages) for stages in self.stages)

    @cached_property
    def start(self) -> float:
        """Begin of the first bar."""
        return min(bar.start for bar in self.bars)

    @cached_property
    def makespan(self) -> float:
        """Time from the begin of the first bar of any rank to the end of the last bar of any rank."""
        return max(bar.end for bar in self.bars) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(bar.duration for bar in self.of_rank(rank)) for rank in range(self.ranks))

    @cached_property
    def bubble(self) -> float:
        """Share of the ranks' time that is spent waiting: 1 - busy / (ranks * makespan), from 0 to 1."""
        return _share_idle(sum(self.busy), self.ranks * self.makespan)

    @cached_property
    def bubble_between(self) -> float:
        """Share of waiting between the first and the last bar of each rank, from 0 to 1.

        What a rank waits before its first and after its last bar is left out. Zero-bubble schedules are
        without bubble in this sense (Qi et al. 2024, arXiv:2401.10241): a next step may begin on one rank
        while others still work on this one.
        """
        spans = 0.0
        for rank in range(self.ranks):
            own = self.of_rank(rank)
            spans += max(bar.end for bar in own) - min(bar.start for bar in own)
        return _share_idle(sum(self.busy), spans)

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Most microbatches in flight at once, for each rank: what its memory for activations must hold.

        A microbatch is in flight on a stage from the begin of its forward pass to the end of its backward
        pass, of both halves where that is split. One stage counts 1 / (stages of the rank), so that
        schedules with more stages on a rank compare with others.
        """
        return tuple(self._peak(rank) for rank in range(self.ranks))

    def _peak(self, rank: int) -> float:
        begins: dict[tuple[int, int], float] = {}
        ends: dict[tuple[int, int], float] = {}
        for bar in self.of_rank(rank):
            place = (bar.stage, bar.microbatch)
            begins[place] = min(bar.start, begins.get(place, bar.start))
            ends[place] = max(bar.end, ends.get(place, bar.end))
        # At one and the same time, what ends makes room before anything begins.
        changes = sorted([(time, -1) for time in ends.values()] + [(time, 1) for time in begins.values()])
        now = peak = 0
        for _, change in changes:
            now += change
            peak = max(peak, now)
        return peak / len(self.stages[rank])

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Bar, ...]]:
        found: dict[int, list[Bar]] = defaultdict(list)
        for bar in sorted(self.bars, key=lambda bar: (bar.start, bar.end)):
            found[bar.rank].append(bar)
        return {rank: tuple(bars) for rank, bars in found.items()}

    def of_rank(self, rank: int) -> tuple[Bar, ...]:
        """Return the bars of a rank in the order of time."""
        return self._by_rank[rank]

    def scaled(self, factor: float, unit: str) -> Timeline:
        """Return the same in another unit, beginning at 0.

        Args:
            factor: What times are multiplied by.
            unit: The unit that this gives.
        """
        bars = (
            replace(bar, start=(bar.start - self.start) * factor, end=(bar.end - self.start) * factor)
            for bar in self.bars
        )
        return replace(self, bars=tuple(bars), unit=unit)


def _checked(part: tuple[int, str, int, float, float]) -> tuple[int, Kind, int, float, float]:
    stage, kind, microbatch, start, end = part
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}. Give the letter that torch uses.")
    return stage, kind, microbatch, start, end


def _share_idle(busy: float, available: float) -> float:
    # Sums of times are rounded: without waiting the difference may come out as -1e-16.
    return max(0.0, 1 - busy / available) if available else 0.0
