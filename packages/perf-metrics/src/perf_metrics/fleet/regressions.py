"""Jobs whose OFU fell against their own past: within the job, or against earlier jobs of the same run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from .changes import LEAST_FALL

RegressionKind: TypeAlias = Literal["within the job", "against earlier jobs of the run"]

SHORTEST_JOB_S = 1800.0
"""Seconds that a job must have run to be held against others: one that crashed at its start tells nothing."""
_FEWEST_EARLIER = 2
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class JobLevel:
    """The usual OFU of one job of a run, as a share; `start` is Unix time in seconds."""

    job: str
    run: str
    gpus: int
    start: float
    ofu: float


@dataclass(frozen=True)
class Regression:
    """A job whose OFU fell.

    Attributes:
        job: Its name.
        kind: Against what it fell.
        time_s: Unix time since when, in seconds: of the fall within the job, or of the job's start.
        before: OFU before as a share: the level before the fall, or the median of the earlier jobs.
        after: OFU after as a share.
        gpus: Number of GPUs of the job.
        detail: What else to know, such as the number of earlier jobs.
    """

    job: str
    kind: RegressionKind
    time_s: float
    before: float
    after: float
    gpus: int
    detail: str

    @property
    def fall(self) -> float:
        """Share of its OFU that the job lost."""
        return 1 - self.after / self.before

    @property
    def lost_gpus(self) -> float:
        """GPUs at their tensor peak whose work is lost."""
        return (self.before - self.after) * self.gpus


def slower_than_earlier_jobs(levels: Sequence[JobLevel]) -> Iterator[Regression]:
    """Yield the jobs below the median of the earlier jobs of their run on as many GPUs.

    By a tenth at least, and by three standard deviations of the earlier jobs where there are three or more.
    """
    runs: defaultdict[tuple[str, int], list[JobLevel]] = defaultdict(list)
    for level in sorted(levels, key=lambda one: one.start):
        earlier = runs[level.run, level.gpus]
        if len(earlier) >= _FEWEST_EARLIER:
            past = [one.ofu for one in earlier]
            usual = median(past)
            if usual > 0 and level.ofu < usual * (1 - _least_fall(past)):
                yield Regression(
                    level.job,
                    "against earlier jobs of the run",
                    level.start,
                    usual,
                    level.ofu,
                    level.gpus,
                    f"run {level.run}, {len(earlier)} earlier jobs on {level.gpus} GPUs",
                )
        earlier.append(level)


def _least_fall(past: Sequence[float]) -> float:
    spread = stdev(past) / fmean(past) if len(past) >= 3 else 0.0
    return max(LEAST_FALL, _DEVIATIONS * spread)
