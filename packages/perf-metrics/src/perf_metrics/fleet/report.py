"""The report on a fleet: each job, how MFU and OFU agree, outliers with candidates, regressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..ofu.diagnosis import Candidate, diagnose
from .agreement import Agreement, Pair, agreement, agreement_by_gpus
from .applications import Application
from .job_figures import JobFigures, job_figures
from .job_samples import FleetSamples
from .regressions import SHORTEST_JOB_S, JobLevel, Regression, slower_than_earlier_jobs

_NOTHING_KNOWN = Application(mfu=None)
_NAMES_IN_NOTE = 5
MAX_OFU = 1.05
"""What passes it is held against a wrong clock."""


@dataclass(frozen=True, kw_only=True)
class OutlierRule:
    """When MFU and OFU of a job are too far apart.

    Attributes:
        points: Apart by more percentage points than this; or
        ratio: by more than this factor, either way, and
        ratio_points: by more points than this. So that a quarter more is seen where both are low.
    """

    points: float = 10.0
    ratio: float = 1.25
    ratio_points: float = 5.0

    def __post_init__(self) -> None:
        for name in ("points", "ratio_points"):
            if not 0 < getattr(self, name) < 100:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be 0 to 100 percentage points")
        if not 1 < self.ratio < math.inf:
            raise ValueError(f"ratio={self.ratio!r}: must be above 1")

    def holds(self, pair: Pair) -> bool:
        """Whether the job is an outlier."""
        apart = abs(pair.points)
        if apart > self.points:
            return True
        low, high = sorted((pair.mfu, pair.ofu))
        return apart > self.ratio_points and high > self.ratio * low


@dataclass(frozen=True)
class JobReport:
    """What is known of one job.

    Attributes:
        figures: What the counters say.
        application: What the job says of itself.
        gpus: Number of its GPUs: what the application says, else its usual devices.
        outlier: Whether MFU and OFU are too far apart.
        candidates: What would explain the difference or the fall, within the error of OFU; best first. For
            outliers and regressions only.
    """

    figures: JobFigures
    application: Application
    gpus: int
    outlier: bool = False
    candidates: tuple[Candidate, ...] = ()

    @property
    def pair(self) -> Pair | None:
        """MFU and OFU over the same time, where both are known."""
        mfu, ofu = self.application.mfu, self.compared_ofu
        return None if mfu is None or ofu is None else Pair(mfu, ofu, self.gpus)

    @property
    def compared_ofu(self) -> float | None:
        """OFU over the times at which the application told MFU, where these are known; else over all."""
        figures, times = self.figures, self.application.times
        if times is None:
            return None if figures.ofu is None else figures.ofu.mean
        rows = zip(figures.times, figures.series, figures.counts, strict=True)
        told = [(ofu, count) for time, ofu, count in rows if round(time, 3) in times]
        devices = sum(count for _, count in told)
        return math.fsum(ofu * count for ofu, count in told) / devices if devices else None


@dataclass(frozen=True)
class FleetReport:
    """The report on a fleet.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between samples.
        jobs: Of each job, in the order of their starts.
        agreement: Of all jobs with MFU and OFU; None when there are none.
        buckets: The same by number of GPUs.
        regressions: Jobs whose OFU fell, the largest loss first: points times GPUs.
        notes: What was missing or not used, in sentences.
    """

    start: float
    end: float
    step_s: float
    jobs: tuple[JobReport, ...]
    agreement: Agreement | None
    buckets: tuple[Agreement, ...]
    regressions: tuple[Regression, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def outliers(self) -> list[JobReport]:
        """Jobs whose MFU and OFU are too far apart, the farthest first."""
        found = [(abs(job.pair.points), job) for job in self.jobs if job.outlier and job.pair is not None]
        return [job for _, job in sorted(found, key=lambda one: -one[0])]

    @property
    def ofu_mean(self) -> float | None:
        """Mean OFU over all samples of all jobs, as a share."""
        told = [(job.figures.samples, job.figures.ofu.mean) for job in self.jobs if job.figures.ofu]
        samples = sum(count for count, _ in told)
        return math.fsum(count * ofu for count, ofu in told) / samples if samples else None


def fleet_report(
    fleet: FleetSamples,
    applications: Mapping[str, Application] | None = None,
    rule: OutlierRule | None = None,
) -> FleetReport:
    """Make the report.

    Args:
        fleet: What `collect_fleet` read.
        applications: What the jobs say of themselves, by the name of the job.
        rule: When MFU and OFU of a job are too far apart.
    """
    applications, rule = applications or {}, rule or OutlierRule()
    jobs = []
    for name, seen in fleet.jobs.items():
        figures = job_figures(name, seen, fleet.start, fleet.end, fleet.step_s)
        application = applications.get(name, _NOTHING_KNOWN)
        jobs.append(JobReport(figures, application, application.gpus or figures.usual_devices))
    jobs.sort(key=lambda job: (math.isnan(job.figures.start), job.figures.start, job.figures.job))
    regressions = sorted(_regressions(jobs), key=lambda one: -one.lost_gpus)
    pairs = [job.pair for job in jobs if job.pair is not None]
    return FleetReport(
        fleet.start,
        fleet.end,
        fleet.step_s,
        tuple(_judged(job, rule, regressions) for job in jobs),
        agreement(pairs),
        agreement_by_gpus(pairs),
        tuple(regressions),
        (*fleet.notes, *_notes(jobs, applications)),
    )


def _regressions(jobs: Sequence[JobReport]) -> Iterator[Regression]:
    for job in jobs:
        figures = job.figures
        for drop in figures.drops:
            levels = drop.time_s, drop.before, drop.after
            yield Regression(figures.job, "within the job", *levels, job.gpus, f"{job.gpus} GPUs")
    yield from slower_than_earlier_jobs(
        [
            # The median: a restart begins with minutes of loading and compiling.
            JobLevel(job.figures.job, run, job.gpus, job.figures.start, job.figures.ofu.p50)
            for job in jobs
            if (run := job.application.run) is not None
            and job.figures.ofu is not None
            and job.figures.end - job.figures.start >= SHORTEST_JOB_S
        ]
    )


def _judged(job: JobReport, rule: OutlierRule, regressions: Sequence[Regression]) -> JobReport:
    pair = job.pair
    if pair is None or not (pair.mfu and pair.ofu) or pair.ofu > MAX_OFU:
        return replace(job, outlier=pair is not None and rule.holds(pair))
    usual = [one.before for one in regressions if one.job == job.figures.job]
    outlier = rule.holds(pair)
    if not outlier and not usual:
        return job
    facts = replace(job.application.facts, usual_ofu=fmean(usual)) if usual else job.application.facts
    found = diagnose(pair.mfu, pair.ofu, facts).candidates
    return replace(job, outlier=outlier, candidates=tuple(one for one in found if one.fits))


def _notes(jobs: Sequence[JobReport], applications: Mapping[str, Application]) -> Iterator[str]:
    above = [job.figures.job for job in jobs if job.figures.ofu and job.figures.ofu.mean > MAX_OFU]
    if above:
        yield f"OFU of {len(above)} jobs is above 100 %: {_some(above)}; is the tensor clock theirs?"
    if not applications:
        return
    for name, application in applications.items():
        yield from (f"job {name}: {note}" for note in application.notes)
    seen = {job.figures.job for job in jobs}
    unseen = [name for name in applications if name not in seen]
    if unseen:
        yield f"{len(unseen)} jobs report MFU and have no counters in this time: {_some(unseen)}"
    silent = [job.figures.job for job in jobs if job.application.mfu is None]
    if silent:
        yield f"{len(silent)} jobs have counters and report no MFU: {_some(silent)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_NOTE} more" if len(names) > _NAMES_IN_NOTE else ""
    return ", ".join(names[:_NAMES_IN_NOTE]) + more
