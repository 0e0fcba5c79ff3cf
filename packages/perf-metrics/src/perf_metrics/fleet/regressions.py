"""Where OFU fell and stayed low: within a job, or against earlier jobs of the same run."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from ..student_t import t_quantile
from ..uncertainty import (
    CONFIDENCE,
    MeanInterval,
    independent_difference,
    mean_interval,
)

LEAST_FALL = 0.10
"""Share of its level that OFU must lose: the day-to-day spread of a steady job is a few percent."""
LEAST_LEVEL = 0.03
"""OFU below which there is nothing to fall from: a device that idles shows shares of a percent."""
LEAST_S = 1200.0
"""Seconds that each of the two levels must last."""
_STALL_S = 900.0
"""Seconds of a checkpoint or an evaluation, at most; it is not part of the level around it."""
_BLOCK_S = 300.0
_LEAST_T = 6.0
"""Difference of two means over its standard error; high, as the best of many cuts is taken."""
_MOST_CORRELATION = 0.75
"""Of means over five minutes; short series with a slow drift would seem more alike than can be told apart."""
_ABRUPT = 0.6
_LEAST_POINTS = 16
_OUTLIER = 6.0
"""Median distances from the level, about four standard deviations."""


@dataclass(frozen=True)
class Drop:
    """A lasting fall of OFU within a job.

    Attributes:
        time_s: Unix time of the first sample at the lower level, in seconds.
        before: OFU of the level before without short stalls, as a share.
        after: OFU of the level after without short stalls, as a share.
        interval: Of the step, by the samples of both levels that are not stalls and not near the edge. That
            the cut was chosen where the two differ most is not in it; that is why a fall takes six standard
            errors to be found.
    """

    time_s: float
    before: float
    after: float
    interval: MeanInterval | None = None


def find_drops(times: Sequence[float], values: Sequence[float]) -> tuple[Drop, ...]:
    """Return where the level of a series falls by a tenth or more, for twenty minutes or more, at once.

    A running median over half an hour passes over stalls of up to a quarter and keeps an edge where it is.
    Its means over five minutes are cut where two parts differ most (binary segmentation), as long as they
    differ by six standard errors of the series' own noise. Parts that differ by less than a tenth are joined
    again, and the edges put to a sample. A decline without an edge is not a fall.

    Args:
        times: Unix times in seconds, ascending.
        values: OFU at these times, as shares.

    Raises:
        ValueError: The two are not of the same length.
    """
    if len(times) != len(values):
        raise ValueError(f"times and values must be of one length, not {len(times)} and {len(values)}.")
    if len(times) < _LEAST_POINTS or times[-1] - times[0] < 2 * LEAST_S:
        return ()
    step_s = median(later - earlier for earlier, later in pairwise(times))
    steady = _without_stalls(values, max(1, round(_STALL_S / step_s)))
    calm = _without_outliers(values, steady)
    starts, blocks = _blocks(times, steady)
    noise = _noise(calm, max(1, round(_BLOCK_S / step_s)))
    block_edges = _joined([0, *_cuts(blocks, noise), len(blocks)], blocks)
    # A stall beside an edge moves it less over a shorter time.
    sharp = _without_stalls(values, max(1, round(_BLOCK_S / step_s)))
    edges = [_refined(block, starts, sharp) for block in block_edges[1:-1]]
    ends = [0, *edges, len(steady)]
    levels = [steady[low:high] for low, high in pairwise(ends)]
    near, margin = max(1, round(LEAST_S / step_s)), max(1, round(_BLOCK_S / step_s))
    return tuple(
        Drop(times[edge], fmean(before), fmean(after), _interval_of_drop(calm, low, edge, high, margin))
        for low, edge, high, (before, after) in zip(ends, edges, ends[2:], pairwise(levels), strict=False)
        if fmean(after) < fmean(before) >= LEAST_LEVEL and _is_abrupt(before, after, near)
    )


def _interval_of_drop(calm: Sequence[float], low: int, edge: int, high: int, margin: int) -> MeanInterval:
    """Return the level before - that after an edge, with its interval.

    From the samples without stalls: running medians are alike over half an hour. Where exactly the edge is,
    is known to some samples, of which one on the wrong side moves a mean by more than noise does; so those
    around it are left out.
    """
    before = _between(calm, low, edge, margin)
    after = _between(calm, edge, high, margin)
    return independent_difference(mean_interval(before), mean_interval(after))


def _between(values: Sequence[float], low: int, high: int, margin: int) -> Sequence[float]:
    """Return the values between two edges, without those near an edge that is not an end of the series."""
    margin = min(margin, (high - low) // 4)
    return values[low + margin * (low > 0) : high - margin * (high < len(values))]


def _without_stalls(values: Sequence[float], half: int) -> list[float]:
    """Return the running median over so many samples on either side."""
    window = sorted(values[:half])
    found = []
    for place in range(len(values)):
        if place + half < len(values):
            insort(window, values[place + half])
        if place > half:
            window.pop(bisect_left(window, values[place - half - 1]))
        found.append(window[len(window) // 2])
    return found


def _without_outliers(values: Sequence[float], steady: Sequence[float]) -> list[float]:
    """Return the values, and the level where a value is a stall."""
    apart = [abs(value - level) for value, level in zip(values, steady, strict=True)]
    most = _OUTLIER * median(apart)
    rows = zip(values, steady, apart, strict=True)
    return [value if distance <= most else level for value, level, distance in rows]


def _blocks(times: Sequence[float], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return where each block of five minutes begins, and its mean."""
    numbers = [int((time - times[0]) // _BLOCK_S) for time in times]
    starts = [0, *(place for place in range(1, len(times)) if numbers[place] != numbers[place - 1])]
    ends = [*starts[1:], len(times)]
    return starts, [fmean(values[low:high]) for low, high in zip(starts, ends, strict=True)]


def _noise(values: Sequence[float], width: int) -> float:
    """Return the standard error of the mean of so many values, were all such means independent.

    From medians of differences, which a few changes of level do not move. For first-order autocorrelation r,
    the squares of differences over two places are 1 + r times those over one; the mean of many is then as
    uncertain as that of (1 - r) / (1 + r) times as many.
    """
    sums = [0.0, *accumulate(values)]
    means = [(high - low) / width for low, high in zip(sums, sums[width:], strict=False)]
    ones, twos = (
        median([(later - earlier) ** 2 for earlier, later in zip(means, means[lag:], strict=False)])
        for lag in (width, 2 * width)
    )
    alike = min(_MOST_CORRELATION, max(0.0, twos / ones - 1)) if ones else 0.0
    # The median of the squares of normal values is 0.455 of their mean.
    variance = ones / 0.455 / 2 / (1 - alike)
    return math.sqrt(variance * (1 + alike) / (1 - alike))


def _is_abrupt(before: Sequence[float], after: Sequence[float], near: int) -> bool:
    """Whether most of the step is where the levels meet."""
    step = fmean(before[-near:]) - fmean(after[:near])
    return step > _ABRUPT * (fmean(before) - fmean(after))


def _cuts(blocks: Sequence[float], noise: float) -> list[int]:
    found, parts = [], [(0, len(blocks))]
    while parts:
        low, high = parts.pop()
        cut = _best_cut(blocks[low:high], noise)
        if cut is not None:
            found.append(low + cut)
            parts.extend(((low, low + cut), (low + cut, high)))
    return sorted(found)


def _best_cut(blocks: Sequence[float], noise: float) -> int | None:
    least, count = round(LEAST_S / _BLOCK_S), len(blocks)
    if count < 2 * least:
        return None
    cut = _best_split(blocks, range(least, count - least + 1))
    # What grows towards an end is of a change nearer to it than a level lasts.
    if cut in (least, count - least) and _best_split(blocks, range(1, count)) != cut:
        return None
    error = noise * math.sqrt(1 / cut + 1 / (count - cut))
    return cut if abs(fmean(blocks[:cut]) - fmean(blocks[cut:])) > _LEAST_T * error else None


def _best_split(values: Sequence[float], cuts: Iterable[int]) -> int:
    """Return where two means leave the smallest sum of squares."""
    count, sums = len(values), [0.0, *accumulate(values)]
    return max(cuts, key=lambda cut: sums[cut] ** 2 / cut + (sums[count] - sums[cut]) ** 2 / (count - cut))


def _joined(edges: list[int], values: Sequence[float]) -> list[int]:
    """Take out the edge with the smallest step until every step is large enough."""
    while len(edges) > 2:
        steps = [
            _step(values[low:middle], values[middle:high])
            for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False)
        ]
        smallest = min(range(len(steps)), key=steps.__getitem__)
        if steps[smallest] >= LEAST_FALL:
            break
        edges = edges[: smallest + 1] + edges[smallest + 2 :]
    return edges


def _step(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the share that the higher level loses, by its mean or its median, whichever loses less."""
    falls = [1 - of(after) / of(before) if of(before) > 0 else 0.0 for of in (fmean, median)]
    rises = [1 - of(before) / of(after) if of(after) > 0 else 0.0 for of in (fmean, median)]
    return max(min(falls), min(rises))


def _refined(block: int, starts: Sequence[int], values: Sequence[float]) -> int:
    """Return the sample near the beginning of a block at which two levels part best."""
    low = starts[max(0, block - 3)]
    high = starts[block + 3] if block + 3 < len(starts) else len(values)
    return low + _best_split(values[low:high], range(1, high - low))


RegressionKind: TypeAlias = Literal["within the job", "against earlier jobs of the run"]

SHORTEST_JOB_S = 1800.0
"""Seconds that a job must have run to be compared with others: one that crashed early says nothing."""
_FEWEST_EARLIER = 2
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class JobLevel:
    """The usual OFU of one job of a run, as a share; `start` is Unix time in seconds."""

    job: str
    run: str
    gpus: int
    start: float
    ofu: float


@dataclass(frozen=True)
class Regression:
    """A job whose OFU fell.

    Attributes:
        job: Its name.
        kind: Against what it fell.
        time_s: Unix time since when, in seconds: of the fall within the job, or of the job's start.
        before: OFU before as a share: the level before the fall, or the median of the earlier jobs.
        after: OFU after as a share.
        gpus: Number of GPUs of the job.
        detail: What else to know, such as the number of earlier jobs.
        interval: Of before - after, with which the fall is certain or not.
    """

    job: str
    kind: RegressionKind
    time_s: float
    before: float
    after: float
    gpus: int
    detail: str
    interval: MeanInterval | None = None

    @property
    def is_certain(self) -> bool | None:
        """Whether the interval is above 0; None where there is none."""
        low = None if self.interval is None else self.interval.low
        return None if low is None else low > 0

    @property
    def fall(self) -> float:
        """Share of its OFU that the job lost."""
        return 1 - self.after / self.before

    @property
    def lost_gpus(self) -> float:
        """GPUs at their tensor peak whose work is lost."""
        return (self.before - self.after) * self.gpus


def slower_than_earlier_jobs(levels: Sequence[JobLevel]) -> Iterator[Regression]:
    """Yield the jobs below the median of the earlier jobs of their run on as many GPUs.

    By a tenth at least, and by three standard deviations of the earlier jobs where there are three or more.
    """
    runs: defaultdict[tuple[str, int], list[JobLevel]] = defaultdict(list)
    for level in sorted(levels, key=lambda one: one.start):
        earlier = runs[level.run, level.gpus]
        if len(earlier) >= _FEWEST_EARLIER:
            past = [one.ofu for one in earlier]
            usual = median(past)
            if usual > 0 and level.ofu < usual * (1 - _least_fall(past)):
                yield Regression(
                    level.job,
                    "against earlier jobs of the run",
                    level.start,
                    usual,
                    level.ofu,
                    level.gpus,
                    f"run {level.run}, {len(earlier)} earlier jobs on {level.gpus} GPUs",
                    _interval_of_next_job(past, usual, level.ofu),
                )
        earlier.append(level)


def _interval_of_next_job(past: Sequence[float], usual: float, now: float) -> MeanInterval:
    """Return usual - now, with the prediction interval of one more job: t s sqrt(1 + 1/n), n - 1 degrees.

    Jobs of one run differ, by nodes and neighbours, more than the samples within one of them tell. With two
    earlier jobs t is 12.7: so few say little, however near to each other they are.
    """
    count = len(past)
    error = stdev(past) * math.sqrt(1 + 1 / count)
    half_width = t_quantile(0.5 + CONFIDENCE / 2, count - 1) * error
    return MeanInterval(usual - now, half_width, CONFIDENCE, error, count - 1, count)


def _least_fall(past: Sequence[float]) -> float:
    spread = stdev(past) / fmean(past) if len(past) >= 3 else 0.0
    return max(LEAST_FALL, _DEVIATIONS * spread)
