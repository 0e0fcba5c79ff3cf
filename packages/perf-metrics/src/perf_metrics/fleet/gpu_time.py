"""How long each sample of a GPU stands for, and figures over that time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

_NEIGHBOURS = 4
"""Gaps on either side that tell the spacing around a sample: of nine, four may be outages."""
_FEWEST = 5
"""Samples from which on those of a device tell their own spacing."""
_SAME_CELL = 1e-3
"""Share of a step by which a time may pass a multiple of the step: servers round times to milliseconds."""


def usual_gap(times: Sequence[float]) -> float:
    """Return the median of the seconds between samples; NaN for fewer than two."""
    return median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else math.nan


def seconds_of(times: Sequence[float], usual_s: float) -> Sequence[float]:
    """Return the seconds before each sample that it stands for: the spacing of the samples around it.

    Counters are averages over the time before a sample, so that one scraped every two minutes stands for four
    times as long as one scraped every thirty seconds, and one after an outage for no longer than the next.

    Args:
        times: Unix times in seconds, ascending.
        usual_s: Spacing to assume where there are too few samples to tell one.
    """
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if len(times) < _FEWEST:
        return [usual_s, *(min(usual_s, gap) for gap in gaps)][: len(times)]
    least = min(gaps)
    if max(gaps) - least <= _SAME_CELL * least:
        return [median(gaps)] * len(times)
    found = [median_low(gaps[:_NEIGHBOURS])]
    for place, gap in enumerate(gaps):
        spacing = median_low(gaps[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1])
        if gap > spacing:  # an outage, after which scrapes may be rarer or more frequent than before
            spacing = median_low(gaps[place + 1 : place + 1 + _NEIGHBOURS] or [spacing])
        found.append(spacing)
    return found


def cells(
    times: Sequence[float], seconds: Sequence[float], start: float, step_s: float
) -> Iterator[tuple[int, int, float]]:
    """Yield number of a step after `start`, place of a sample, and the seconds of the step it stands for."""
    for place, (time_s, length) in enumerate(zip(times, seconds, strict=True)):
        end = (time_s - start) / step_s
        begin = end - length / step_s
        first, last = math.floor(begin + _SAME_CELL) + 1, math.ceil(end - _SAME_CELL)
        if first >= last:
            yield last, place, length
            continue
        for number in range(first, last + 1):
            low = begin if number == first else number - 1
            yield number, place, ((end if number == last else number) - low) * step_s


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean; of no weight at all NaN."""
    total = math.fsum(weights)
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(products) / total if total else math.nan


def weighted_percentiles(
    values: Sequence[float], weights: Sequence[float], shares: Sequence[float]
) -> list[float]:
    """Return percentiles of one value or more, on the line between neighbours.

    A value stands in the middle of its weight. With equal weights the lowest is at 0 and the highest at 1.
    """
    rows = sorted(zip(values, weights, strict=True))
    places, passed = [], 0.0
    for _, weight in rows:
        places.append(passed + weight / 2)
        passed += weight
    found, row = [], 0
    for share in shares:
        place = places[0] + share * (places[-1] - places[0])
        while row + 2 < len(rows) and places[row + 1] < place:
            row += 1
        after = min(row + 1, len(rows) - 1)
        width = places[after] - places[row]
        part = (place - places[row]) / width if width else 0.0
        found.append(rows[row][0] + part * (rows[after][0] - rows[row][0]))
    return found


@dataclass(frozen=True)
class Span:
    """The samples of one GPU in one job: their times, OFU and seconds."""

    times: Sequence[float]
    ofu: Sequence[float]
    seconds: Sequence[float]


def time_of_one_gpu(spans: Sequence[Span], start: float, step_s: float) -> tuple[float, float]:
    """Return the seconds of a GPU in all of its jobs, and the sum of OFU x seconds.

    What jobs share of it counts once.
    """
    ordered = sorted((span for span in spans if span.times), key=lambda span: span.times[0])
    if all(earlier.times[-1] < later.times[0] for earlier, later in pairwise(ordered)):
        return (
            math.fsum(second for span in ordered for second in span.seconds),
            math.fsum(
                ofu * second for span in ordered for ofu, second in zip(span.ofu, span.seconds, strict=True)
            ),
        )
    # In any step a GPU can be busy for no longer than the step.
    sums: dict[int, tuple[float, float]] = {}
    for span in ordered:
        for number, place, second in cells(span.times, span.seconds, start, step_s):
            length, work = sums.get(number, (0.0, 0.0))
            sums[number] = length + second, work + span.ofu[place] * second
    lengths = {number: min(length, step_s) for number, (length, _) in sums.items()}
    works = (work / length * lengths[number] for number, (length, work) in sums.items() if length)
    return math.fsum(lengths.values()), math.fsum(works)
