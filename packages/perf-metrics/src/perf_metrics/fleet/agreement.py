"""How well MFU and OFU of many jobs agree, together and by number of GPUs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, stdev

NEAR_POINTS = 10.0
FAR_POINTS = 20.0
_MOST_BUCKETS = 16


@dataclass(frozen=True)
class Pair:
    """MFU and OFU of one job as shares, and its number of GPUs."""

    mfu: float
    ofu: float
    gpus: int

    @property
    def points(self) -> float:
        """MFU - OFU in percentage points."""
        return 100 * (self.mfu - self.ofu)


@dataclass(frozen=True)
class Agreement:
    """How well MFU and OFU of some jobs agree; the figures of the publication's table.

    Attributes:
        gpus: Number of GPUs of the jobs, such as "8", "129-256", or "all".
        jobs: Number of jobs.
        correlation: Pearson's; None for fewer than three jobs, or where one of the two does not vary.
        mae_points: Mean of |MFU - OFU| in percentage points.
        sd_points: Standard deviation of |MFU - OFU| in points; None for one job.
        bias_points: Mean of MFU - OFU in points.
        within_10: Share of the jobs within 10 points.
        beyond_20: Share of the jobs more than 20 points apart.
        mfu_mean: Mean MFU as a share.
        mfu_sd: Its standard deviation; None for one job.
        ofu_mean: Mean OFU as a share.
    """

    gpus: str
    jobs: int
    correlation: float | None
    mae_points: float
    sd_points: float | None
    bias_points: float
    within_10: float
    beyond_20: float
    mfu_mean: float
    mfu_sd: float | None
    ofu_mean: float


def agreement(pairs: Sequence[Pair], gpus: str = "all") -> Agreement | None:
    """Return how well MFU and OFU of these jobs agree; None without jobs."""
    if not pairs:
        return None
    apart = [abs(pair.points) for pair in pairs]
    mfu, ofu = [pair.mfu for pair in pairs], [pair.ofu for pair in pairs]
    return Agreement(
        gpus=gpus,
        jobs=len(pairs),
        correlation=_correlation(mfu, ofu),
        mae_points=fmean(apart),
        sd_points=_deviation(apart),
        bias_points=fmean(pair.points for pair in pairs),
        within_10=sum(points <= NEAR_POINTS for points in apart) / len(pairs),
        beyond_20=sum(points > FAR_POINTS for points in apart) / len(pairs),
        mfu_mean=fmean(mfu),
        mfu_sd=_deviation(mfu),
        ofu_mean=fmean(ofu),
    )


def agreement_by_gpus(pairs: Sequence[Pair]) -> tuple[Agreement, ...]:
    """Return the agreement for each number of GPUs, or for powers of two where there are many numbers."""
    counts = {pair.gpus for pair in pairs}
    bucket_of: Callable[[int], tuple[int, int]] = (
        (lambda gpus: (gpus, gpus)) if len(counts) <= _MOST_BUCKETS else _power_of_two
    )
    buckets: defaultdict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        buckets[bucket_of(pair.gpus)].append(pair)
    found = (agreement(buckets[bucket], _bucket_name(*bucket)) for bucket in sorted(buckets))
    return tuple(one for one in found if one is not None)


def _power_of_two(gpus: int) -> tuple[int, int]:
    high = 1 << (gpus - 1).bit_length()
    return high // 2 + 1, high


def _bucket_name(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 3:
        return None
    try:
        value = correlation(first, second)
    except StatisticsError:  # one of the two is constant
        return None
    return value if math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
