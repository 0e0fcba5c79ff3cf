"""GPU time of a fleet by user and account: who had how much of it, and how well it was used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .job_figures import weighted_mean
from .job_identity import NO_USER
from .ledger import LedgerKind, sum_of_ledgers

if TYPE_CHECKING:
    from .report import JobReport


@dataclass(frozen=True, slots=True)
class UserTime:
    """The GPU time of the jobs of one user under one account.

    Attributes:
        user: Their name, or "unknown".
        account: Slurm's account or Kueue's queue; None where it is not known.
        jobs: Number of their jobs.
        device_hours: GPU time of these jobs; a GPU that jobs share counts for each.
        ofu: Mean over that time, as a share; None without a figure.
        mfu_share: Share of that time whose jobs report MFU.
        hours: That time by what it was spent on.
    """

    user: str
    account: str | None
    jobs: int
    device_hours: float
    ofu: float | None
    mfu_share: float
    hours: Mapping[LedgerKind, float] = field(default_factory=dict)

    @property
    def hours_without_work(self) -> float:
        """Device hours in which the tensor cores of these jobs did next to nothing, or waited."""
        return math.fsum(hours for kind, hours in self.hours.items() if kind != "working")

    @property
    def idle_hours(self) -> float | None:
        """Device hours at the peak that these jobs did not use; None without a figure."""
        return None if self.ofu is None else self.device_hours * (1 - self.ofu)


def time_by_user(jobs: Sequence[JobReport]) -> tuple[UserTime, ...]:
    """Return the time of each user and account, the most first; nothing where no user is known."""
    if not any(job.identity is not None and job.identity.user for job in jobs):
        return ()
    groups: defaultdict[tuple[str, str | None], list[JobReport]] = defaultdict(list)
    for job in jobs:
        known = job.identity
        user = NO_USER if known is None or known.user is None else known.user
        groups[user, None if known is None else known.account].append(job)
    found = [_time(user, account, own) for (user, account), own in groups.items()]
    return tuple(sorted(found, key=lambda one: (-one.device_hours, one.user)))


def _time(user: str, account: str | None, jobs: Sequence[JobReport]) -> UserTime:
    hours = math.fsum(job.figures.device_hours for job in jobs)
    told = [(job.figures.ofu.mean, job.figures.device_hours) for job in jobs if job.figures.ofu is not None]
    with_mfu = math.fsum(job.figures.device_hours for job in jobs if job.application.mfu is not None)
    return UserTime(
        user,
        account,
        len(jobs),
        hours,
        weighted_mean(*zip(*told, strict=True)) if told and any(each for _, each in told) else None,
        with_mfu / hours if hours else 0.0,
        sum_of_ledgers(job.hours for job in jobs),
    )
