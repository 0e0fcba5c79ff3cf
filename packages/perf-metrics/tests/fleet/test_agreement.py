import pytest

from perf_metrics.fleet.app_metrics import Pair, agreement, agreement_by_gpus


def test_the_figures_by_hand() -> None:
    pairs = [Pair(0.40, 0.38, 8), Pair(0.30, 0.35, 8), Pair(0.50, 0.25, 8), Pair(0.20, 0.32, 8)]
    found = agreement(pairs)
    assert found is not None
    # 2, 5, 25 and 12 points apart.
    assert found.mae_points == pytest.approx(11.0)
    assert found.bias_points == pytest.approx(2.5)
    assert found.sd_points == pytest.approx(((9**2 + 6**2 + 14**2 + 1) / 3) ** 0.5)
    assert (found.within_10, found.beyond_20) == (0.5, 0.25)
    assert found.mfu_mean == pytest.approx(0.35)
    # Deviations from the means (0.05, -0.05, 0.15, -0.15) and (0.055, 0.025, -0.075, -0.005).
    assert found.correlation == pytest.approx(-0.009 / (0.05 * 0.0093) ** 0.5)


def test_what_cannot_be_told_of_few_or_equal_jobs_is_none() -> None:
    assert agreement([]) is None
    alone = agreement([Pair(0.4, 0.3, 8)])
    assert alone is not None
    assert (alone.correlation, alone.sd_points, alone.mfu_sd) == (None, None, None)
    equal = agreement([Pair(0.4, 0.3, 8)] * 5)
    assert equal is not None
    assert equal.correlation is None


def test_numbers_of_gpus_are_buckets_or_powers_of_two_when_there_are_many() -> None:
    few = agreement_by_gpus([Pair(0.4, 0.4, gpus) for gpus in (288, 8, 8, 16)])
    assert [(one.gpus, one.jobs) for one in few] == [("8", 2), ("16", 1), ("288", 1)]
    many = agreement_by_gpus([Pair(0.4, 0.4, gpus) for gpus in range(1, 21)])
    assert [(one.gpus, one.jobs) for one in many] == [
        ("1", 1),
        ("2", 1),
        ("3-4", 2),
        ("5-8", 4),
        ("9-16", 8),
        ("17-32", 4),
    ]
