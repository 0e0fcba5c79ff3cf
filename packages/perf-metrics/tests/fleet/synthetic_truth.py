"""What is true of a synthetic fleet, from its very samples and from what was planted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from .planted import OddKind
from .synthetic_plan import Job


@dataclass(frozen=True)
class Level:
    """A fall within a job: Unix time of the first lower sample in seconds, and OFU before and after.

    The medians of the samples, as stalls are not part of a level.
    """

    time_s: float
    before: float
    after: float


@dataclass(frozen=True)
class JobTruth:
    """What is true of one job.

    Attributes:
        plan: What was planned, with what is planted.
        exact: Whether each sample falls into a step of its own, 30 s each. Where scrapes come late, two may
            fall into one, and a query sees the last.
        mfu: What the job reports, as a share.
        ofu: Of each sample that can be used, as a share, ascending.
        devices: Mean OFU, tensor activity and SM clock in MHz, by name of the device.
        first_s: Unix time of the first sample in seconds.
        last_s: Unix time of the last sample in seconds.
        fall: The planted fall.
    """

    plan: Job
    exact: bool
    mfu: float
    ofu: Sequence[float]
    devices: dict[str, tuple[float, float, float]]
    first_s: float
    last_s: float
    fall: Level | None

    @property
    def name(self) -> str:
        """Value of its label."""
        return self.plan.name

    @property
    def mean(self) -> float:
        """Mean OFU over its samples, as a share."""
        return math.fsum(self.ofu) / len(self.ofu)

    @property
    def points(self) -> float:
        """MFU - OFU in percentage points."""
        return 100 * (self.mfu - self.mean)

    @property
    def is_outlier(self) -> bool:
        """Whether the two are 10 points apart, or 5 points and a quarter of the lower one."""
        far = abs(self.points) > 5 and max(self.mfu, self.mean) > 1.25 * min(self.mfu, self.mean)
        return abs(self.points) > 10 or far

    @property
    def odd_devices(self) -> dict[str, OddKind]:
        """Kind by name of the device."""
        odd = self.plan.odd
        if odd is None:
            return {}
        return {name: odd.kind for name in self.devices if name.endswith(f"GPU {odd.index}")}

    @property
    def regressions(self) -> set[str]:
        """Against what its OFU fell."""
        kinds = {"within the job"} if self.fall is not None else set()
        slower = self.plan.run == "slower-after-restart" and self.plan.ofu < 0.35
        return kinds | ({"against earlier jobs of the run"} if slower else set())


@dataclass(frozen=True)
class Figures:
    """How well MFU and OFU of some jobs agree, in the units of the command's JSON."""

    jobs: int
    correlation: float | None
    mae_points: float
    sd_points: float | None
    within_10: float
    beyond_20: float
    mfu_mean: float
    mfu_sd: float | None


@dataclass(frozen=True)
class Truth:
    """What is true of the fleet: its range in Unix time, and its jobs by name."""

    start_s: int
    end_s: int
    jobs: dict[str, JobTruth]

    @property
    def samples(self) -> int:
        """Samples of all jobs that can be used."""
        return sum(len(job.ofu) for job in self.jobs.values())

    @property
    def ofu_mean(self) -> float:
        """Mean OFU over all samples of all jobs, as a share."""
        return math.fsum(value for job in self.jobs.values() for value in job.ofu) / self.samples

    @property
    def figures(self) -> Figures:
        """Of all jobs."""
        return figures(self.jobs.values())

    @property
    def by_gpus(self) -> dict[int, Figures]:
        """By number of GPUs."""
        counts = sorted({job.plan.gpus for job in self.jobs.values()})
        return {
            count: figures(job for job in self.jobs.values() if job.plan.gpus == count) for count in counts
        }


def figures(jobs: Iterable[JobTruth]) -> Figures:
    """Return the figures of some jobs, one at least."""
    pairs = [(job.mfu, job.mean) for job in jobs]
    apart = [100 * abs(mfu - ofu) for mfu, ofu in pairs]
    mfu = [mfu for mfu, _ in pairs]
    return Figures(
        jobs=len(pairs),
        correlation=_correlation(pairs),
        mae_points=fmean(apart),
        sd_points=_deviation(apart),
        within_10=sum(points <= 10 for points in apart) / len(pairs),
        beyond_20=sum(points > 20 for points in apart) / len(pairs),
        mfu_mean=fmean(mfu),
        mfu_sd=_deviation(mfu),
    )


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    mfu_mean, ofu_mean = fmean(mfu for mfu, _ in pairs), fmean(ofu for _, ofu in pairs)
    together = math.fsum((mfu - mfu_mean) * (ofu - ofu_mean) for mfu, ofu in pairs)
    mfu_square = math.fsum((mfu - mfu_mean) ** 2 for mfu, _ in pairs)
    ofu_square = math.fsum((ofu - ofu_mean) ** 2 for _, ofu in pairs)
    return together / math.sqrt(mfu_square * ofu_square)


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
