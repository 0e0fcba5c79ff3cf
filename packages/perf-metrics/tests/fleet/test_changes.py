from random import Random

import pytest

from perf_metrics.fleet.regressions import find_drops

STEP_S = 30.0


def series(*levels: tuple[float, int], seed: int = 0) -> tuple[list[float], list[float]]:
    random = Random(seed)
    values = [level * (1 + random.gauss(0, 0.03)) for level, count in levels for _ in range(count)]
    return [STEP_S * index for index in range(len(values))], values


def test_a_lasting_fall_is_found_at_its_time() -> None:
    times, values = series((0.40, 120), (0.26, 80))
    (drop,) = find_drops(times, values)
    assert abs(drop.time_s - 120 * STEP_S) <= STEP_S
    assert drop.before == pytest.approx(0.40, rel=0.02)
    assert drop.after == pytest.approx(0.26, rel=0.02)


def test_two_falls_and_a_rise_between_are_two_drops() -> None:
    times, values = series((0.40, 90), (0.30, 90), (0.42, 90), (0.20, 90))
    assert [round(drop.time_s / STEP_S) for drop in find_drops(times, values)] == [90, 270]


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_series_has_none(seed: int) -> None:
    assert find_drops(*series((0.4, 400), seed=seed)) == ()


def test_checkpoints_and_evaluations_are_no_falls() -> None:
    # Stalls of up to 4 minutes every half hour.
    times, values = series(*[(0.4, 52), (0.02, 8)] * 6, (0.4, 40))
    assert find_drops(times, values) == ()


def test_a_fall_is_seen_through_stalls() -> None:
    times, values = series(*[(0.4, 55), (0.0, 5)] * 3, *[(0.3, 55), (0.0, 5)] * 3)
    (drop,) = find_drops(times, values)
    assert abs(drop.time_s - 180 * STEP_S) <= 6 * STEP_S


def test_a_fall_of_less_than_a_tenth_and_one_of_few_minutes_are_left() -> None:
    assert find_drops(*series((0.40, 200), (0.375, 200))) == ()
    assert find_drops(*series((0.40, 200), (0.20, 12))) == ()


def wandering(correlation: float, spread: float, count: int, seed: int) -> tuple[list[float], list[float]]:
    """A level of 0.4 with noise whose neighbours are alike."""
    random, state, values = Random(seed), 0.0, []
    for _ in range(count):
        state = correlation * state + random.gauss(0, spread * (1 - correlation**2) ** 0.5)
        values.append(max(0.0, 0.4 * (1 + state)))
    return [STEP_S * index for index in range(count)], values


@pytest.mark.parametrize(("correlation", "spread"), [(0.0, 0.3), (0.9, 0.08), (0.98, 0.08)])
@pytest.mark.parametrize("seed", range(5))
def test_noise_whose_neighbours_are_alike_has_none(correlation: float, spread: float, seed: int) -> None:
    assert find_drops(*wandering(correlation, spread, 2880, seed)) == ()


def test_evaluations_of_a_quarter_of_an_hour_neither_make_nor_hide_a_fall() -> None:
    def hours(level: float, count: int) -> list[tuple[float, int]]:
        return [(level, 92), (0.02, 28)] * count

    assert find_drops(*series(*hours(0.4, 12))) == ()
    (drop,) = find_drops(*series(*hours(0.4, 6), *hours(0.26, 6)))
    # At the end of an evaluation, to within its length.
    assert -14 * 60 <= drop.time_s - 6 * 120 * STEP_S <= 0
    assert (drop.before, drop.after) == pytest.approx((0.4, 0.26), rel=0.05)


def test_a_decline_without_an_edge_and_the_noise_of_an_idle_device_are_none() -> None:
    times = [STEP_S * index for index in range(960)]
    assert find_drops(times, [0.4 * (1 - index / 2400) for index in range(960)]) == ()
    random = Random(0)
    assert find_drops(times, [abs(random.gauss(0, 0.0004)) for _ in times]) == ()


def test_a_slow_start_is_no_fall() -> None:
    assert find_drops(*series((0.02, 30), (0.4, 100))) == ()


def test_short_series_and_unequal_lengths() -> None:
    assert find_drops([], []) == ()
    assert find_drops([0.0], [0.4]) == ()
    with pytest.raises(ValueError, match="one length, not 1 and 2"):
        find_drops([0.0], [0.4, 0.3])
