"""Confidence intervals for the mean of a time series, for differences of two, and how long to measure.

Samples of OFU, and log entries of MFU or tokens per second, follow one another: a slow minute makes several
low samples, and a checkpoint makes a run of them. A standard error over samples x GPUs takes them for
independent and comes out several times too small. Here a job is one series over time, the mean over its GPUs
in each step, so that what its GPUs have in common stays in it; and the variance of its mean is the long-run
variance of that series divided by its length.

The estimate is the equal-weighted cosine estimate with Student's t (Lazarus, Lewis, Stock and Watson, "HAR
Inference: Recommendations for Practice", Journal of Business & Economic Statistics 36, 2018): the mean of the
squares of the first few cosine coefficients, with as many degrees of freedom. How many is chosen by the
series' own autocorrelation; see `mean_interval`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from .student_t import t_quantile

LONGEST_STEP_S = 30.0
"""Seconds over which the hardware averages tensor activity at most ("Instant GPU Efficiency Visibility at
Fleet Scale", section IV-C); samples farther apart say nothing of the time between."""
FEWEST_SAMPLES = 16
"""Below this, neither the spread nor the correlation of neighbours can be told."""
CONFIDENCE = 0.95

_FEWEST_BATCHES = 16
_MOST_VALUES = 1024
"""A longer series is averaged into blocks first. It costs no accuracy, as only slow changes are looked at."""
_LEAST_DF, _MOST_DF, _SAMPLES_PER_DF = 4, 12, 8
"""With fewer than four, the width of an interval is mostly chance. More than a dozen degrees of freedom
narrow an interval by a few percent, and reach up to the frequencies of checkpoints and evaluations, whose
large and regular swings are not part of the error of a mean."""
_FLATNESS = 0.5
"""Highest frequency used, in units of that at which an AR(1) spectrum has fallen to half."""
_NOTICED = 1.5
_MOST_CORRELATION = 0.999
_LEAST_RATIO = 0.3
_DRIFT_DF = 0.1
"""Degrees of freedom by the autocorrelation alone below which a series does not come back to a level."""

_logger = logging.getLogger("perf_metrics")


@dataclass(frozen=True)
class MeanInterval:
    """A mean, or a difference of means, with its confidence interval: mean +- `half_width`.

    Attributes:
        mean: In the unit of the values; a share where they are shares.
        half_width: Half the width of the interval, in the same unit; None where there is none.
        confidence: Share of such intervals that hold the true value, such as 0.95.
        standard_error: Of the mean; None where there is no interval.
        degrees_of_freedom: Of Student's t; 0 where there is no interval.
        samples: Number of values.
        step_s: Seconds that a value stands for; None where it is not known.
        samples_per_df: Values that one degree of freedom takes, by their autocorrelation.
        reason: Why there is no interval; None with one.
    """

    mean: float
    half_width: float | None
    confidence: float
    standard_error: float | None
    degrees_of_freedom: float
    samples: int
    step_s: float | None = None
    samples_per_df: float = float(_SAMPLES_PER_DF)
    reason: str | None = None

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width

    def includes(self, value: float) -> bool | None:
        """Whether the interval holds the value; None where there is no interval."""
        return None if self.half_width is None else abs(value - self.mean) <= self.half_width

    def scaled(self, factor: float) -> MeanInterval:
        """Return the same in another unit, such as points for shares with a factor of 100."""
        half_width = None if self.half_width is None else self.half_width * factor
        error = None if self.standard_error is None else self.standard_error * factor
        return replace(self, mean=self.mean * factor, half_width=half_width, standard_error=error)

    def in_percent(self) -> str:
        """Return a share as text, such as "31.2 % (± 0.4)"; without an interval "31.2 %"."""
        mean = f"{100 * self.mean:.1f} %"
        return mean if self.half_width is None else f"{mean} ({plus_minus(100 * self.half_width)})"

    def in_points(self, *, sign: str = "+") -> str:
        """Return a difference of shares as text, such as "+9.9 (± 0.4)"; without an interval "+9.9".

        Args:
            sign: "+" for a sign in any case, "" for one of negative differences only.
        """
        mean = f"{100 * self.mean:{sign}.1f}"
        return mean if self.half_width is None else f"{mean} ({plus_minus(100 * self.half_width)})"


def plus_minus(half_width: float) -> str:
    """Return "± 0.4": one decimal, or as many as the first digit that is not 0 takes, up to three."""
    decimals = next((places for places in (1, 2, 3) if half_width >= 0.5 * 10**-places), 1)
    return f"± {half_width:.{decimals}f}"


def mean_interval(
    values: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    step_s: float | None = None,
    confidence: float = CONFIDENCE,
) -> MeanInterval:
    """Return the mean of a series in time with its confidence interval.

    The interval is for the level that the series varies around: what its mean would come to if the job ran on
    like this. It therefore holds more than the error of sampling, which is the difference from the mean of
    the very same time sampled more often (section IV-C of "Instant GPU Efficiency Visibility at Fleet
    Scale").

    With residuals e_1 ... e_n from the mean and c_j = sqrt(2/n) sum_t e_t cos(pi j (t - 1/2) / n), the
    long-run variance is (c_1^2 + ... + c_v^2) / v, and the half-width t_v sqrt(long-run variance / n). The
    number v is the largest of 4 to 12, n / 8 at most above 4, at whose frequencies the spectrum is still
    flat: for a first-order autocorrelation r it is n (1 - r) / (2 pi sqrt(r)), by the values and by their
    means over 2, 4, 8, ... values, whichever asks for the fewest, since noise of single samples (the clock is
    read at one instant) hides slow changes. r is corrected for its bias in short series (Marriott and Pope,
    Biometrika 41, 1954), and the variance for what an AR(1) spectrum with it loses up to frequency v.

    It is assumed that the series varies around one level. What happens less than some four times in it, such
    as an evaluation once an hour, is not in the interval. A pause between values is passed over.

    Args:
        values: One for each step of time, in order. Of several GPUs, the mean over them in each step.
        weights: What each value counts, such as the GPU time in its step; equal by default.
        step_s: Seconds between values, for `shortest_window`.
        confidence: Share of such intervals that hold the true value.

    Returns:
        The mean; without an interval for fewer than 16 values and for those that do not stay around a level,
        with the reason.

    Raises:
        ValueError: There are no values, one of them is not finite, weights are negative, all 0 or not as
            many, or another argument is out of range.
    """
    _check_confidence(confidence)
    if step_s is not None and not 0 < step_s < math.inf:
        raise ValueError(f"step_s={step_s!r} must be a positive number of seconds, such as 30.")
    mean, residuals = _residuals(values, weights)
    count = len(residuals)
    if count < FEWEST_SAMPLES:
        reason = f"{count} samples are too few for an interval, which takes {FEWEST_SAMPLES}"
        return MeanInterval(mean, None, confidence, None, 0, count, step_s, reason=reason)
    blocks = _blocks(residuals)
    most, correlation, batches = _flat_frequencies(blocks)
    if most < _DRIFT_DF:
        reason = "the samples drift or step from one level to another, so that their mean tells no level"
        return MeanInterval(mean, None, confidence, None, 0, count, step_s, reason=reason)
    df = max(_LEAST_DF, int(min(_MOST_DF, count / _SAMPLES_PER_DF, most)))
    coefficients = list(_cosine_coefficients(blocks, df))
    lost = max(_LEAST_RATIO, _mean_spectrum(correlation, batches, df))
    variance = math.fsum(one * one for one in coefficients) / df / lost
    error = math.sqrt(variance / len(blocks))
    half_width = t_quantile(0.5 + confidence / 2, df) * error
    per_df = max(float(_SAMPLES_PER_DF), count / most)
    return MeanInterval(mean, half_width, confidence, error, df, count, step_s, per_df)


class RunningSeries:
    """Takes a series value by value, however long, for its `mean_interval`: old values are kept as means."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1
        """Values in a mean."""
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Take the next value."""
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        self._means.append(math.fsum(self._pending) / self._each)
        self._pending.clear()
        if len(self._means) == 2 * _MOST_VALUES:
            self._means = [(one + other) / 2 for one, other in zip(*[iter(self._means)] * 2, strict=True)]
            self._each *= 2

    def interval(self, step_s: float | None = None) -> MeanInterval | None:
        """Return the mean with its interval; None where there are too few values for one.

        Args:
            step_s: Seconds between values.
        """
        if len(self._means) < FEWEST_SAMPLES:
            return None
        return mean_interval(self._means, step_s=None if step_s is None else step_s * self._each)


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    step_s: float | None = None,
    confidence: float = CONFIDENCE,
) -> MeanInterval:
    """Return the mean of first - second with its interval, where both were read at the same times.

    Such as MFU - OFU of one job: what moves both, like a slow phase, cancels out.

    Raises:
        ValueError: They are not of one length, or as for `mean_interval`.
    """
    if len(first) != len(second):
        raise ValueError(f"first and second must be of one length, not {len(first)} and {len(second)}.")
    apart = [one - other for one, other in zip(first, second, strict=True)]
    return mean_interval(apart, weights=weights, step_s=step_s, confidence=confidence)


def independent_difference(first: MeanInterval, second: MeanInterval) -> MeanInterval:
    """Return first - second with its interval, for two series that have nothing to do with one another.

    Such as two runs, or the levels before and after a fall. The squares of the standard errors add up, and
    the degrees of freedom are Welch's: (a + b)^2 / (a^2 / v_a + b^2 / v_b) for the squares a and b (Welch,
    Biometrika 34, 1947).

    Returns:
        The difference; without an interval where one of the two has none.

    Raises:
        ValueError: The two are of different confidence.
    """
    if first.confidence != second.confidence:
        raise ValueError(
            f"confidence must be one for both, not {first.confidence:g} and {second.confidence:g}."
        )
    samples = min(first.samples, second.samples)
    difference = first.mean - second.mean
    if first.standard_error is None or second.standard_error is None:
        reason = first.reason or second.reason
        return MeanInterval(difference, None, first.confidence, None, 0, samples, reason=reason)
    squares = first.standard_error**2, second.standard_error**2
    df = _welch(squares, (first.degrees_of_freedom, second.degrees_of_freedom))
    error = math.sqrt(sum(squares))
    half_width = t_quantile(0.5 + first.confidence / 2, df) * error
    return MeanInterval(difference, half_width, first.confidence, error, df, samples)


_LONGEST_WINDOW_S = 3.2e8
"""Ten years: nobody measures so long."""


def shortest_window(difference: float, *measured: MeanInterval, power: float = 0.8) -> float | None:
    """Return the seconds that each series must be measured to tell a difference of this size.

    A difference is told when the interval does not hold 0, and a true one of this size is told with
    probability `power`: the time T at which (t_confidence + t_power) sqrt(sum of long-run variances / T) is
    the difference, with the spread and the autocorrelation that were measured so far. It is as uncertain as
    these are: the variance is known to sqrt(2 / degrees of freedom) of itself, 40 % with a dozen, and so is
    the time.

    Args:
        difference: In the unit of the values, such as 0.01 for one point of OFU.
        measured: One series against a fixed number, or the two that are compared, each for that time.
        power: Probability of telling a true difference of this size.

    Returns:
        Seconds, of at least 16 samples; None where a series has no interval, and where ten years are not
        enough.

    Raises:
        ValueError: The difference is not positive, `power` is not 0.5 to below 1, or a series has no
            `step_s`.
    """
    if not 0 < difference < math.inf:
        raise ValueError(f"difference={difference!r} must be a positive number, such as 0.01 for one point.")
    if not 0.5 <= power < 1:
        raise ValueError(f"power={power!r} must be at least 0.5 and below 1, such as 0.8.")
    if not measured:
        raise ValueError("measured is empty. Give one or two series with their intervals.")
    per_second: list[float] = []  # long-run variance x seconds
    steps: list[float] = []
    for one in measured:
        if one.step_s is None:
            raise ValueError("a series has no step_s. Give the seconds between its samples to mean_interval.")
        if one.standard_error is None:
            return None
        per_second.append(one.standard_error**2 * one.samples * one.step_s)
        steps.append(one.step_s)

    def is_enough(seconds: float) -> bool:
        squares = [variance / seconds for variance in per_second]
        dfs = [
            max(_LEAST_DF, min(_MOST_DF, seconds / step / one.samples_per_df))
            for one, step in zip(measured, steps, strict=True)
        ]
        df = _welch(squares, dfs)
        least = t_quantile(0.5 + measured[0].confidence / 2, df) + t_quantile(power, df)
        return least * math.sqrt(sum(squares)) <= difference

    low = float(FEWEST_SAMPLES * max(steps))
    if is_enough(low):
        return low
    high = 2 * low
    while not is_enough(high):
        if high > _LONGEST_WINDOW_S:
            return None
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def rare_samples_note(step_s: float) -> str | None:
    """Return why samples so far apart miss time; None where they do not."""
    if not step_s > LONGEST_STEP_S * 1.01:  # scrapes are late by parts of a second
        return None
    return (
        f"samples every {step_s:g} s miss time: the hardware averages tensor activity over at most "
        f"{LONGEST_STEP_S:g} s, so that OFU and its interval are of {LONGEST_STEP_S / step_s:.0%} of the time"
    )


@cache
def _warn_of(note: str) -> None:
    _logger.warning("%s", note)


def warn_of_rare_samples(step_s: float) -> str | None:
    """Log `rare_samples_note`, once for each step in a process, and return it."""
    note = rare_samples_note(step_s)
    if note is not None:
        _warn_of(note)
    return note


def interval_json(interval: MeanInterval) -> dict[str, float | int | str | None]:
    """Return an interval as what `json` can write."""
    names = ("mean", "half_width", "low", "high", "confidence", "degrees_of_freedom", "samples", "reason")
    return {name: getattr(interval, name) for name in names}


def _check_confidence(value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"confidence={value!r} must be between 0 and 1, such as 0.95.")


def _residuals(values: Sequence[float], weights: Sequence[float] | None) -> tuple[float, list[float]]:
    """Return the mean, and what each value adds to its error, times the number of values."""
    if not values:
        raise ValueError("values is empty. A mean takes one value or more.")
    if not all(map(math.isfinite, values)):
        raise ValueError("values must be finite numbers. Leave out nan and infinities.")
    if weights is None:
        mean = math.fsum(values) / len(values)
        return mean, _without_rounding([value - mean for value in values], values)
    if len(weights) != len(values):
        raise ValueError(f"weights must be as many as values, {len(values)}, not {len(weights)}.")
    total = math.fsum(weights)
    if min(weights) < 0 or not 0 < total < math.inf:
        raise ValueError("weights must be finite and 0 or more, and not all 0.")
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    scale = len(values) / total
    apart = [(value - mean) * weight * scale for value, weight in zip(values, weights, strict=True)]
    return mean, _without_rounding(apart, values)


def _without_rounding(apart: list[float], values: Sequence[float]) -> list[float]:
    """Return 0 for all residuals of a constant series: rounding errors have an autocorrelation too."""
    return apart if max(map(abs, apart)) > 1e-12 * max(map(abs, values)) else [0.0] * len(apart)


def _blocks(values: Sequence[float]) -> list[float]:
    """Return at most so many means of as good as equal numbers of neighbours."""
    count = len(values)
    if count <= _MOST_VALUES:
        return list(values)
    places = [round(count * number / _MOST_VALUES) for number in range(_MOST_VALUES + 1)]
    return [math.fsum(values[low:high]) * _MOST_VALUES / count for low, high in pairwise(places)]


def _flat_frequencies(values: Sequence[float]) -> tuple[float, float, int]:
    """Return how many cosines lie where the spectrum is flat; the autocorrelation that says so, and of how
    many.

    That is by the values, by the means of two, of four and so on, the smallest number.
    """
    fewest, found, batches = math.inf, 0.0, len(values)
    level = list(values)
    while len(level) >= _FEWEST_BATCHES:
        correlation = _autocorrelation(level)
        if correlation > 0:
            flat = _FLATNESS * len(level) / math.pi * (1 - correlation) / math.sqrt(correlation)
            if flat < fewest:
                fewest, found, batches = flat, correlation, len(level)
        level = [(one + other) / 2 for one, other in zip(level[::2], level[1::2], strict=False)]
    return min(fewest, float(len(values))), found, batches


def _autocorrelation(values: Sequence[float]) -> float:
    """Return the first-order autocorrelation without its bias, from 0 to just below 1.

    0 within one and a half standard errors of what independent values have, -1/n +- 1/sqrt(n): else many an
    interval would be wide by a chance correlation of a few batches.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    apart = [value - mean for value in values]
    squares = math.fsum(one * one for one in apart)
    if squares <= 0:
        return 0.0
    raw = math.fsum(one * other for one, other in pairwise(apart)) / squares
    if raw < _NOTICED / math.sqrt(count) - 1 / count:
        return 0.0
    return min(_MOST_CORRELATION, max(0.0, (count * raw + 1) / (count - 3)))


def _cosine_coefficients(values: Sequence[float], most: int) -> Iterator[float]:
    count = len(values)
    for number in range(1, most + 1):
        turn = math.pi * number / count
        products = (value * math.cos(turn * (place + 0.5)) for place, value in enumerate(values))
        yield math.sqrt(2 / count) * math.fsum(products)


def _mean_spectrum(correlation: float, count: int, most: int) -> float:
    """Return the mean of an AR(1) spectrum at the frequencies of the cosines, over that at 0."""
    if correlation == 0:
        return 1.0
    steepness = 2 * correlation / (1 - correlation) ** 2
    turns = (math.pi * number / count for number in range(1, most + 1))
    return math.fsum(1 / (1 + steepness * (1 - math.cos(turn))) for turn in turns) / most


def _welch(squares: Sequence[float], dfs: Sequence[float]) -> float:
    below = math.fsum(square * square / df for square, df in zip(squares, dfs, strict=True))
    return sum(squares) ** 2 / below if below > 0 else min(dfs)
