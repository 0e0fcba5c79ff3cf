"""Coverage by simulation: 95 % intervals hold the truth in 93 to 97 % of the cases.

The default test has 2,000 cases over all kinds; the one marked `full` has 2,000 of each kind.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from random import Random
from statistics import fmean, median, stdev

import pytest

from perf_metrics.fleet.regressions import find_drops
from perf_metrics.uncertainty import independent_difference, mean_interval, shortest_window

LEVEL = 0.40
SPREAD = 0.01
CHECKPOINT_EVERY, CHECKPOINT_LASTS = 60, 4
"""Samples: at 30 s each, half an hour and two minutes."""
DIP = 0.38


def autoregressive(random: Random, count: int, correlation: float) -> Iterator[float]:
    """Yield values of variance 1 whose neighbours have this correlation."""
    state = random.gauss()
    for _ in range(count):
        yield state
        state = correlation * state + math.sqrt(1 - correlation**2) * random.gauss()


def independent(random: Random, count: int) -> list[float]:
    return [LEVEL + SPREAD * random.gauss() for _ in range(count)]


def correlated(correlation: float) -> Callable[[Random, int], list[float]]:
    return lambda random, count: [
        LEVEL + SPREAD * value for value in autoregressive(random, count, correlation)
    ]


def slow_under_clock_noise(random: Random, count: int) -> list[float]:
    """A slow change that the noise of a clock read at one instant hides from neighbours: r = 0.26."""
    slow = autoregressive(random, count, 0.9)
    return [LEVEL + SPREAD * (0.55 * value + 0.85 * random.gauss()) for value in slow]


def with_checkpoints(random: Random, count: int) -> list[float]:
    """Steps with a checkpoint about every 60 samples, of 2 to 6 samples, beginning anywhere."""
    dips = [0.0] * count
    every = CHECKPOINT_EVERY
    begin = random.uniform(-2 * every, -every)
    while begin < count:
        end = begin + CHECKPOINT_LASTS + random.uniform(-2, 2)
        for place in range(max(0, math.floor(begin)), min(count, math.ceil(end))):
            dips[place] += DIP * (min(place + 1, end) - max(place, begin))
        begin += every * random.uniform(0.8, 1.2)
    noise = autoregressive(random, count, 0.5)
    # The mean of a stationary renewal process: the share of time in checkpoints.
    level = LEVEL + DIP * CHECKPOINT_LASTS / every
    return [level - dip + SPREAD * value for dip, value in zip(dips, noise, strict=True)]


def gpus(random: Random, count: int, number: int = 8) -> list[list[float]]:
    """Eight GPUs that wait for one another: most of what moves one moves all."""
    common = autoregressive(random, count, 0.8)
    return [[LEVEL + SPREAD * (shared + 0.3 * random.gauss()) for _ in range(number)] for shared in common]


def mean_over_gpus(random: Random, count: int) -> list[float]:
    return [fmean(row) for row in gpus(random, count)]


KINDS: dict[str, tuple[Callable[[Random, int], list[float]], int]] = {
    "independent": (independent, 120),
    "independent, short": (independent, 24),
    "correlation 0.5": (correlated(0.5), 240),
    "correlation 0.5, short": (correlated(0.5), 64),
    "correlation 0.9": (correlated(0.9), 600),
    "correlation 0.9, short": (correlated(0.9), 200),
    "slow under clock noise": (slow_under_clock_noise, 1200),
    "checkpoints": (with_checkpoints, 1800),
    "8 GPUs": (mean_over_gpus, 300),
}
"""What is long enough: ten correlation times, (1 + r) / (1 - r) samples each, and thirty checkpoints."""

TOO_SHORT: dict[str, tuple[Callable[[Random, int], list[float]], int]] = {
    "correlation 0.9 in 32 samples": (correlated(0.9), 32),
    "slow under clock noise in 64 samples": (slow_under_clock_noise, 64),
    "a checkpoint or none in 40 samples": (with_checkpoints, 40),
}
"""Two correlation times say little of the spread, and what did not happen in a window cannot be in it."""


def covered(kind: str, simulate: Callable[[Random, int], list[float]], count: int, cases: int) -> float:
    """Return the share of cases with an interval in which it holds the level."""
    random = Random(zlib.crc32(kind.encode()))
    found = [mean_interval(simulate(random, count)).includes(LEVEL) for _ in range(cases)]
    told = [one for one in found if one is not None]
    assert len(told) > 0.99 * cases or kind in TOO_SHORT
    return fmean(told)


def test_two_thousand_intervals_hold_the_truth_in_93_to_97_percent() -> None:
    cases = math.ceil(2000 / len(KINDS))
    shares = {kind: covered(kind, *of_kind, cases) for kind, of_kind in KINDS.items()}
    assert 0.93 <= fmean(shares.values()) <= 0.97
    # 223 cases of one kind have a standard error of 1.5 points by themselves.
    assert all(0.91 <= share <= 0.985 for share in shares.values()), shares


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_series_is_covered_in_93_to_97_percent(kind: str) -> None:
    share = covered(kind, *KINDS[kind], 2000)
    print(f"{kind}, {KINDS[kind][1]} samples: {share:.2%}")
    assert 0.93 <= share <= 0.97


@pytest.mark.full
@pytest.mark.parametrize("kind", TOO_SHORT)
def test_a_window_that_is_too_short_is_known_to_be_covered_less(kind: str) -> None:
    share = covered(kind, *TOO_SHORT[kind], 2000)
    print(f"{kind}: {share:.2%}")
    assert share < 0.93


def test_a_standard_error_over_samples_and_gpus_is_far_too_narrow() -> None:
    random = Random(3)
    hits = []
    for _ in range(100):
        values = [value for row in gpus(random, 300) for value in row]
        hits.append(abs(fmean(values) - LEVEL) <= 1.96 * stdev(values) / math.sqrt(len(values)))
    assert fmean(hits) < 0.35


def covered_difference(cases: int) -> float:
    """Return the share of A/B comparisons, of unlike runs, whose interval holds the true difference."""
    random = Random(11)
    hits = []
    for _ in range(cases):
        first = mean_interval(correlated(0.7)(random, 300))
        second = mean_interval([0.02 + 2 * value for value in correlated(0.3)(random, 90)])
        hits.append(independent_difference(first, second).includes(LEVEL - (0.02 + 2 * LEVEL)))
    return fmean(bool(hit) for hit in hits)


def test_a_difference_of_two_runs_is_covered() -> None:
    assert 0.92 <= covered_difference(400) <= 0.98


@pytest.mark.full
def test_a_difference_of_two_runs_is_covered_in_93_to_97_percent() -> None:
    share = covered_difference(2000)
    print(f"A/B: {share:.2%}")
    assert 0.93 <= share <= 0.97


def covered_falls(cases: int) -> float:
    """Return the share of falls, with checkpoints in half of the jobs, whose interval holds the step."""
    random, step, hits = Random(9), 0.1, list[bool]()
    for case in range(cases):
        before, after = random.randint(120, 400), random.randint(120, 400)
        noise = autoregressive(random, before + after, random.choice((0.0, 0.5, 0.8)))
        values = [
            0.02
            if case % 2 and place % CHECKPOINT_EVERY < CHECKPOINT_LASTS
            else LEVEL - step * (place >= before) + SPREAD * value
            for place, value in enumerate(noise)
        ]
        drops = find_drops([30.0 * place for place in range(len(values))], values)
        hits += [bool(drop.interval.includes(step)) for drop in drops if drop.interval is not None]
    assert len(hits) > 0.98 * cases
    return fmean(hits)


def test_a_fall_is_covered() -> None:
    """Which it was not with the samples around the edge, whose place is known to some samples only: 67 %."""
    assert 0.91 <= covered_falls(200) <= 0.985


@pytest.mark.full
def test_a_fall_is_covered_in_93_to_97_percent() -> None:
    share = covered_falls(2000)
    print(f"falls: {share:.2%}")
    assert 0.93 <= share <= 0.97


def test_the_window_that_is_told_tells_the_difference_with_about_its_power() -> None:
    """80 % by the formula; some less, as the degrees of freedom vary from window to window."""
    random, difference, step_s = Random(5), 0.004, 30.0
    simulate = correlated(0.5)
    # The median of what pilots of 200 samples say: one of them knows the spread to a fifth or so.
    pilots = [
        shortest_window(difference, *(mean_interval(simulate(random, 200), step_s=step_s) for _ in range(2)))
        for _ in range(41)
    ]
    seconds = sorted(one for one in pilots if one is not None)[20]
    count = round(seconds / step_s)
    told = []
    for _ in range(300):
        first, second = (mean_interval(simulate(random, count)) for _ in range(2))
        apart = independent_difference(first, second)
        # As if the first were better by so much.
        told.append(apart.half_width is not None and apart.mean + difference > apart.half_width)
    assert 0.65 <= fmean(told) <= 0.9


PUBLISHED_POINTS = {5: 0.07, 10: 0.18, 20: 0.15, 30: 0.22}
"""Section IV-C of "Instant GPU Efficiency Visibility at Fleet Scale": the 95 % interval in points at most, of
OFU sampled every so many seconds against every second, over 3000 s."""


def test_the_published_figures_of_sampling_are_of_this_magnitude() -> None:
    """With the published clock (mean 1352 MHz, standard deviation 32) and OFU of 40 %.

    At 5, 20 and 30 s a clock that is read independently each time explains the published figures: 1.96 x 40
    points x 32 / 1352 / sqrt(n) is 0.08, 0.15 and 0.19, times sqrt(1 - 1 / step) against every second. At
    10 s it gives 0.11, and the publication 0.18, more than at 20 s, which no error of this kind explains.
    Ours is for the level of the job, not for the same 3000 s, and has t in place of 1.96, so that it is
    wider than that by a tenth to a quarter.
    """
    random = Random(1)
    for step_s, published in PUBLISHED_POINTS.items():
        widths = []
        for _ in range(40):
            clocks = [random.gauss(1352, 32) for _ in range(3000 // step_s)]
            widths.append(mean_interval([0.40 * mhz / 1352 for mhz in clocks]).half_width or math.nan)
        usual, plain = 100 * median(widths), 1.96 * 40 * 32 / 1352 / math.sqrt(3000 / step_s)
        assert 1.0 < usual / plain < 1.35, step_s
        assert 0.6 < usual / published < 1.4, step_s
