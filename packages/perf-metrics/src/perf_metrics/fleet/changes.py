"""Where a series of OFU falls and stays low."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

LEAST_FALL = 0.10
"""Share of its level that OFU must lose: the day-to-day spread of a steady job is a few percent."""
LEAST_S = 600.0
"""Seconds that each of the two levels must last: checkpoints and evaluations are shorter."""
_STALL_S = 300.0
"""Seconds of a checkpoint or an evaluation, at most; it is no part of the level around it."""
_LEAST_POINTS = 8
_PEAK = 16
"""Points on both sides among which a cut must be the best."""
_LEAST_T = 6.0
"""Difference of the means over its standard error. High, as neighbouring samples are not independent."""


@dataclass(frozen=True)
class Drop:
    """A lasting fall of OFU within a job.

    Attributes:
        time_s: Unix time of the first sample at the lower level, in seconds.
        before: OFU of the level before without short stalls, as a share.
        after: OFU of the level after without short stalls, as a share.
    """

    time_s: float
    before: float
    after: float


def find_drops(times: Sequence[float], values: Sequence[float]) -> tuple[Drop, ...]:
    """Return where the level of a series falls by a tenth or more, for ten minutes or more.

    Binary segmentation of the running median over ten minutes, which passes over stalls and keeps an edge
    where it is; otherwise a few points near 0 would hide a fall, or draw the cut to them. It is cut where two
    means differ most for their standard error, and each part again. Parts that differ by less are joined.

    Args:
        times: Unix times in seconds, ascending.
        values: OFU at these times, as shares.

    Raises:
        ValueError: The two are not of the same length.
    """
    if len(times) != len(values):
        raise ValueError(f"times and values must be of one length, not {len(times)} and {len(values)}")
    steady = _without_stalls(times, values)
    edges = _joined([0, *_cuts(times, steady), len(steady)], steady)
    levels = [steady[low:high] for low, high in pairwise(edges)]
    return tuple(
        Drop(times[cut], fmean(before), fmean(after))
        for cut, (before, after) in zip(edges[1:], pairwise(levels), strict=False)
        if fmean(after) < fmean(before)
    )


def _without_stalls(times: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the running median over twice the longest stall."""
    if len(values) < 3:
        return list(values)
    step_s = median(later - earlier for earlier, later in pairwise(times))
    half = max(1, round(_STALL_S / step_s))
    window = sorted(values[:half])
    found = []
    for place in range(len(values)):
        if place + half < len(values):
            insort(window, values[place + half])
        if place > half:
            window.pop(bisect_left(window, values[place - half - 1]))
        found.append(window[len(window) // 2])
    return found


def _cuts(times: Sequence[float], values: Sequence[float]) -> list[int]:
    found, parts = [], [(0, len(values))]
    while parts:
        low, high = parts.pop()
        cut = _best_cut(times[low:high], values[low:high])
        if cut is not None:
            found.append(low + cut)
            parts.extend(((low, low + cut), (low + cut, high)))
    return sorted(found)


def _best_cut(times: Sequence[float], values: Sequence[float]) -> int | None:
    count = len(values)
    if count < 2 * _LEAST_POINTS or times[-1] - times[0] < 2 * LEAST_S:
        return None
    sums = [0.0, *accumulate(values)]
    squares = [0.0, *accumulate(value * value for value in values)]
    scores = [0.0, *(_t(cut, count, sums, squares) for cut in range(1, count)), 0.0]
    best, best_score = None, _LEAST_T
    for cut in range(_LEAST_POINTS, count - _LEAST_POINTS + 1):
        if times[cut] - times[0] < LEAST_S or times[-1] - times[cut - 1] < LEAST_S:
            continue
        # A slope towards an end is of a change that is too near to it.
        is_peak = scores[cut] == max(scores[max(0, cut - _PEAK) : cut + _PEAK + 1])
        if is_peak and scores[cut] > best_score:
            best, best_score = cut, scores[cut]
    return best


def _t(cut: int, count: int, sums: Sequence[float], squares: Sequence[float]) -> float:
    """Return the difference of two means over its standard error."""
    rest = count - cut
    before, after = sums[cut] / cut, (sums[count] - sums[cut]) / rest
    spread = squares[count] - cut * before**2 - rest * after**2
    variance = max(spread, 1e-12) / max(1, count - 2)
    return abs(before - after) / math.sqrt(variance * (1 / cut + 1 / rest))


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
