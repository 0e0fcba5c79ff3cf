"""Student's t against printed tables, and what an interval says at its edges."""

from __future__ import annotations

import logging
import math
from random import Random

import pytest

from perf_metrics.student_t import t_quantile
from perf_metrics.uncertainty import (
    MeanInterval,
    RunningSeries,
    independent_difference,
    mean_interval,
    paired_difference,
    plus_minus,
    rare_samples_note,
    shortest_window,
    warn_of_rare_samples,
)

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: probability, degrees of freedom, quantile.
TABLE = [
    (0.90, 1, 3.078), (0.95, 1, 6.314), (0.975, 1, 12.706), (0.99, 1, 31.821), (0.999, 2, 22.327),
    (0.90, 2, 1.886), (0.975, 2, 4.303),
    (0.95, 3, 2.353), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 5, 2.571), (0.99, 7, 2.998),
    (0.975, 10, 2.228), (0.975, 12, 2.179), (0.95, 30, 1.697), (0.975, 60, 2.000), (0.999, 100, 3.174),
]  # fmt: skip


@pytest.mark.parametrize(("probability", "df", "quantile"), TABLE)
def test_quantiles_are_those_of_the_table(probability: float, df: int, quantile: float) -> None:
    assert t_quantile(probability, df) == pytest.approx(quantile, abs=6e-4)
    assert t_quantile(1 - probability, df) == pytest.approx(-quantile, abs=6e-4)


def test_quantiles_where_there_is_a_formula() -> None:
    # One degree of freedom is Cauchy's distribution; two have a closed form.
    for probability in (0.6, 0.8, 0.975, 0.9995):
        assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)
        both = 2 * probability - 1
        assert t_quantile(probability, 2) == pytest.approx(both * math.sqrt(2 / (1 - both**2)), rel=1e-9)
    assert t_quantile(0.5, 7) == 0
    assert t_quantile(0.975, 1e7) == pytest.approx(1.959964, abs=1e-6)
    assert t_quantile(0.975, 2.5) == pytest.approx(3.558, abs=0.02)  # between 2 and 3
    assert t_quantile(0.975, 3) < t_quantile(0.975, 2.5) < t_quantile(0.975, 2)


@pytest.mark.parametrize(("probability", "df"), [(0.0, 3), (1.0, 3), (0.9, 0), (0.9, math.nan)])
def test_quantiles_out_of_range(probability: float, df: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        t_quantile(probability, df)


def noise(count: int, seed: int = 0) -> list[float]:
    random = Random(seed)
    return [0.3 + random.gauss(0, 0.01) for _ in range(count)]


def test_fewer_than_sixteen_samples_have_a_mean_and_no_interval() -> None:
    few = mean_interval(noise(15))
    assert few.mean == pytest.approx(0.3, abs=0.01)
    assert (few.half_width, few.low, few.high, few.includes(0.3)) == (None, None, None, None)
    assert few.reason == "15 samples are too few for an interval, which takes 16"
    assert few.in_percent() == f"{100 * few.mean:.1f} %"
    assert mean_interval(noise(16)).half_width is not None


@pytest.mark.parametrize("count", [100, 1000])
def test_a_level_that_falls_or_drifts_has_none(count: int) -> None:
    step = [value - (0.1 if place >= count // 2 else 0.0) for place, value in enumerate(noise(count))]
    slope = [value - 0.1 * place / count for place, value in enumerate(noise(count))]
    for values in (step, slope):
        reason = mean_interval(values).reason
        assert reason is not None
        assert reason.startswith("the samples drift or step")


def test_a_constant_series_is_certain_whatever_rounding_leaves() -> None:
    constant = mean_interval([0.4] * 100, weights=[0.1 + place for place in range(100)])
    assert (constant.half_width, constant.low) == (0.0, pytest.approx(0.4))
    assert mean_interval([0.1 + 0.2] * 33).in_percent() == "30.0 % (± 0.0)"


def test_weights_count_as_time_does() -> None:
    """A log whose entries are of two lengths says the same as one with the long entries written twice."""
    values = noise(200)
    weights = [2.0 if place % 2 else 1.0 for place in range(200)]
    written_twice = [value for value, weight in zip(values, weights, strict=True) for _ in range(int(weight))]
    weighted, repeated = mean_interval(values, weights=weights), mean_interval(written_twice)
    assert weighted.mean == pytest.approx(repeated.mean)
    assert weighted.standard_error == pytest.approx(repeated.standard_error or 0, rel=0.3)


def test_what_both_series_have_in_common_cancels_out_in_pairs() -> None:
    random = Random(0)
    common = [0.02 * math.sin(place / 9) + random.gauss(0, 0.01) for place in range(400)]
    mfu = [0.40 + one + random.gauss(0, 0.001) for one in common]
    ofu = [0.36 + one + random.gauss(0, 0.001) for one in common]
    paired = paired_difference(mfu, ofu)
    apart = independent_difference(mean_interval(mfu), mean_interval(ofu))
    assert paired.mean == pytest.approx(apart.mean)
    assert paired.includes(0.04)
    assert paired.half_width is not None
    assert apart.half_width is not None
    assert paired.half_width < apart.half_width / 4


def test_a_series_taken_value_by_value_keeps_means_and_the_same_interval() -> None:
    values = noise(10_000)
    series = RunningSeries()
    for value in values:
        series.add(value)
    kept, whole = series.interval(step_s=1.0), mean_interval(values, step_s=1.0)
    assert kept is not None
    assert kept.samples < 2048
    assert kept.step_s == 8  # 10,000 values in means of 8
    assert kept.mean == pytest.approx(whole.mean)
    assert kept.half_width == pytest.approx(whole.half_width, rel=0.3)
    assert RunningSeries().interval() is None


def test_the_difference_of_two_has_welch_degrees_of_freedom() -> None:
    # Welch's formula by hand: (4 + 1)^2 / (16 / 4 + 1 / 8) = 25 / 4.125.
    first = MeanInterval(3.0, 1.0, 0.95, 2.0, 4, 100)
    second = MeanInterval(1.0, 1.0, 0.95, 1.0, 8, 80)
    apart = independent_difference(first, second)
    assert apart.degrees_of_freedom == pytest.approx(25 / 4.125)
    assert apart.half_width == pytest.approx(t_quantile(0.975, 25 / 4.125) * math.sqrt(5))
    assert (apart.mean, apart.samples) == (2.0, 80)
    missing = independent_difference(first, mean_interval([1.0]))
    assert (missing.half_width, missing.reason) == (None, mean_interval([1.0]).reason)
    with pytest.raises(ValueError, match=r"confidence must be one for both, not 0\.95 and 0\.9"):
        independent_difference(first, mean_interval(noise(20), confidence=0.9))


def test_a_window_grows_with_the_square_of_what_it_must_tell() -> None:
    measured = mean_interval(noise(400), step_s=30)
    wide, narrow = shortest_window(0.002, measured), shortest_window(0.001, measured)
    assert wide is not None
    assert narrow is not None
    assert narrow / wide == pytest.approx(4, rel=0.35)  # and fewer degrees of freedom in the shorter one
    assert shortest_window(10.0, measured) == 16 * 30
    both = shortest_window(0.001, measured, measured)
    assert both == pytest.approx(2 * narrow, rel=0.1)
    assert shortest_window(0.001, measured, power=0.5) < narrow  # type: ignore[operator]
    assert shortest_window(0.001, mean_interval(noise(3), step_s=30)) is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mean_interval([]), "values is empty"),
        (lambda: mean_interval([1.0, math.nan]), "values must be finite"),
        (lambda: mean_interval([1.0], weights=[1.0, 2.0]), "weights must be as many as values, 1, not 2"),
        (lambda: mean_interval([1.0, 2.0], weights=[0.0, 0.0]), "weights must be finite and 0 or more"),
        (lambda: mean_interval([1.0, 2.0], weights=[-1.0, 2.0]), "weights must be finite and 0 or more"),
        (lambda: mean_interval([1.0], confidence=95), "confidence=95 must be between 0 and 1"),
        (lambda: mean_interval([1.0], step_s=0), "step_s=0 must be a positive number of seconds"),
        (lambda: paired_difference([1.0], []), "one length, not 1 and 0"),
        (lambda: shortest_window(0, mean_interval(noise(20), step_s=1)), "difference=0 must be positive"),
        (lambda: shortest_window(1, mean_interval(noise(20), step_s=1), power=1), "power=1 must be"),
        (lambda: shortest_window(1, mean_interval(noise(20))), "a series has no step_s"),
        (lambda: shortest_window(1), "measured is empty"),
    ],
)
def test_settings_out_of_range(call, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("=0 must be positive", "=0 must be a positive")):
        call()


def test_text() -> None:
    assert [plus_minus(width) for width in (1.23, 0.4, 0.05, 0.04, 0.005, 0.0006, 0.0)] == [
        "± 1.2", "± 0.4", "± 0.1", "± 0.04", "± 0.01", "± 0.001", "± 0.0",
    ]  # fmt: skip
    interval = MeanInterval(0.312, 0.004, 0.95, 0.002, 8, 100)
    assert (interval.in_percent(), interval.in_points()) == ("31.2 % (± 0.4)", "+31.2 (± 0.4)")
    assert (interval.low, interval.high) == (pytest.approx(0.308), pytest.approx(0.316))
    assert (interval.includes(0.309), interval.includes(0.30)) == (True, False)
    assert interval.scaled(100).half_width == pytest.approx(0.4)


def test_samples_more_than_thirty_seconds_apart_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert rare_samples_note(30.0) is None
    assert rare_samples_note(math.nan) is None
    with caplog.at_level(logging.WARNING, "perf_metrics"):
        notes = {warn_of_rare_samples(47.0) for _ in range(3)}
        warn_of_rare_samples(15.0)
    assert [record.message for record in caplog.records] == list(notes)
    assert notes == {
        "samples every 47 s miss time: the hardware averages tensor activity over at most 30 s, so that OFU "
        "and its interval are of 64% of the time"
    }
