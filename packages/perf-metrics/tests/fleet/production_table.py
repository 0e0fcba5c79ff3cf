"""The 608 production jobs of "Instant GPU Efficiency Visibility at Fleet Scale", by number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_LEAST_OFU, _MOST_OFU = 0.03, 0.60


@dataclass(frozen=True)
class Bucket:
    """Jobs on one number of GPUs: mean and standard deviation of MFU and of |MFU - OFU|, in points."""

    gpus: int
    jobs: int
    mfu_mean: float
    mfu_sd: float
    error_mean: float
    error_sd: float


TABLE = (
    Bucket(8, 6, 28.7, 6.9, 7.5, 3.9),
    Bucket(16, 48, 23.8, 3.3, 12.2, 2.0),
    Bucket(64, 52, 23.6, 2.5, 2.2, 2.4),
    Bucket(128, 48, 24.3, 8.7, 4.5, 2.9),
    Bucket(256, 76, 20.1, 12.6, 9.1, 4.9),
    Bucket(288, 65, 40.1, 16.3, 18.0, 14.4),
    Bucket(512, 144, 23.9, 5.6, 3.6, 2.2),
    Bucket(736, 11, 24.2, 0.4, 3.6, 0.1),
    Bucket(768, 57, 16.9, 4.1, 1.2, 0.7),
    Bucket(1024, 49, 35.0, 9.1, 4.1, 0.7),
    Bucket(1536, 10, 12.4, 2.3, 0.3, 0.2),
    Bucket(2944, 33, 24.0, 3.7, 2.6, 0.3),
    Bucket(5888, 9, 13.6, 0.1, 1.5, 0.2),
)


def bucket_sizes(jobs: int) -> list[int]:
    """Return how many of so many jobs each bucket has: its share of the table, by largest remainder."""
    total = sum(bucket.jobs for bucket in TABLE)
    exact = [jobs * bucket.jobs / total for bucket in TABLE]
    sizes = [int(share) for share in exact]
    short = sorted(range(len(TABLE)), key=lambda place: sizes[place] - exact[place])
    for place in short[: jobs - sum(sizes)]:
        sizes[place] += 1
    return sizes


def draw_job(bucket: Bucket, random: Random) -> tuple[float, float]:
    """Return OFU, and MFU - OFU, of one job as shares.

    Normal MFU, and an error of the bucket's mean and deviation (gamma, as it is never below 0). The table has
    no sign of the error: either one where OFU stays possible, and OFU above MFU twice as often, as tensor
    cores also compute what nobody counts (whole tiles, recomputation).
    """
    shape = (bucket.error_mean / bucket.error_sd) ** 2
    while True:
        mfu = random.gauss(bucket.mfu_mean, bucket.mfu_sd) / 100
        error = random.gammavariate(shape, bucket.error_mean / shape) / 100
        signed = error if random.random() < 1 / 3 else -error
        for difference in (signed, -signed):
            if mfu > 0.01 and _LEAST_OFU < mfu - difference < _MOST_OFU:
                return mfu - difference, difference
