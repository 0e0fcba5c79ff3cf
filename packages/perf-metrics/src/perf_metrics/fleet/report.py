"""The report on a fleet, as objects."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from statistics import StatisticsError, correlation, fmean

from ..ofu.diagnosis import Candidate, diagnose
from ..uncertainty import (
    FEWEST_SAMPLES,
    MeanInterval,
    paired_difference,
    rare_samples_note,
)
from .app_metrics import Agreement, Application, Pair, agreement, agreement_by_gpus
from .gpu_health import GPUHealth, judge_gpus
from .health_samples import HealthSamples
from .job_figures import JobFigures, Span, job_figures, time_of_one_gpu, weighted_mean
from .job_identity import JobIdentity
from .job_samples import FleetSamples
from .ledger import LedgerKind, ledger_of_job, sum_of_ledgers
from .regressions import SHORTEST_JOB_S, JobLevel, Regression, slower_than_earlier_jobs
from .users import UserTime, time_by_user

_NOTHING_KNOWN = Application(mfu=None)
_NAMES_IN_NOTE = 5
_FEWEST_TO_CORRELATE = 3


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
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 to 100 percentage points.")
        if not 1 < self.ratio < math.inf:
            raise ValueError(f"ratio={self.ratio!r} must be above 1.")

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
        identity: Whose it is, and of which run; None where nothing was asked about it.
        gpus: Number of its GPUs: what the application says, else those that it had at a time.
        outlier: Whether MFU and OFU are too far apart.
        candidates: What would explain the difference or the fall, within the error of OFU; best first. For
            outliers and regressions only.
        hours: Its GPU hours by what they were spent on.
    """

    figures: JobFigures
    application: Application
    gpus: int
    outlier: bool = False
    candidates: tuple[Candidate, ...] = ()
    identity: JobIdentity | None = None
    hours: Mapping[LedgerKind, float] = field(default_factory=dict)

    @property
    def run(self) -> str | None:
        """Name of the workload, the same over restarts, where it is known."""
        told = self.application.run
        return told if told is not None or self.identity is None else self.identity.run

    @property
    def pair(self) -> Pair | None:
        """MFU and OFU over the same time, where both are known."""
        mfu, ofu = self.application.mfu, self.compared_ofu
        return None if mfu is None or ofu is None else Pair(mfu, ofu, self.gpus)

    @property
    def compared_ofu(self) -> float | None:
        """OFU over the times at which the application told MFU, where these are known; else over all."""
        if self.application.times is None:
            return None if self.figures.ofu is None else self.figures.ofu.mean
        told = self._compared_steps()
        return weighted_mean(*list(zip(*told, strict=True))[1:]) if told else None

    @cached_property
    def difference(self) -> MeanInterval | None:
        """MFU - OFU as a share with its interval; None where one of the two is not known.

        Where MFU is known over time, of their difference at the same times: what slows both does not count.
        Where it is one number, that is taken as exact, and the interval is that of OFU.
        """
        pair = self.pair
        if pair is None:
            return None
        times, ofu, seconds = zip(*self._compared_steps(), strict=True)
        mfu_at = self.application.mfu_at
        mfu = [pair.mfu if mfu_at is None else mfu_at.get(round(time, 3), pair.mfu) for time in times]
        apart = paired_difference(mfu, ofu, weights=seconds)
        return replace(apart, mean=pair.mfu - pair.ofu)

    @cached_property
    def correlation(self) -> float | None:
        """Pearson's correlation of MFU and OFU over time; None where MFU is one number, or one of them is."""
        mfu_at = self.application.mfu_at or {}
        steps = [(mfu_at[round(time, 3)], ofu) for time, ofu, _ in self._compared_steps() if mfu_at]
        try:
            return correlation(*zip(*steps, strict=True)) if len(steps) >= _FEWEST_TO_CORRELATE else None
        except StatisticsError:  # one of the two does not vary
            return None

    def _compared_steps(self) -> list[tuple[float, float, float]]:
        """Return time, OFU and GPU time of the steps in which OFU is compared with MFU."""
        figures, times = self.figures, self.application.times
        rows = zip(figures.times, figures.series, figures.gpu_seconds, strict=True)
        return [row for row in rows if times is None or round(row[0], 3) in times]


@dataclass(frozen=True)
class FleetReport:
    """The report on a fleet.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between samples.
        jobs: Of each run of a job, in the order of their starts.
        devices: Number of GPUs and slices that had a job, each once.
        device_hours: Their time with a job, each hour of a device once, whatever jobs share it.
        ofu_mean: Mean OFU over that time, as a share; None without any.
        agreement: Of all jobs with MFU and OFU; None when there are none.
        buckets: The same by number of GPUs.
        regressions: Jobs whose OFU fell, the largest loss first: points times GPUs.
        notes: What was missing or not used, in sentences.
        gpus: GPUs that something speaks against, those to take out first.
        unallocated_hours: Hours of GPUs that were scraped without a job; None where nobody asked.
    """

    start: float
    end: float
    step_s: float
    jobs: tuple[JobReport, ...]
    devices: int
    device_hours: float
    ofu_mean: float | None
    agreement: Agreement | None
    buckets: tuple[Agreement, ...]
    regressions: tuple[Regression, ...]
    notes: tuple[str, ...] = field(default=())
    gpus: tuple[GPUHealth, ...] = ()
    unallocated_hours: float | None = None

    @property
    def hours(self) -> dict[LedgerKind, float]:
        """GPU hours by what they were spent on; a GPU that jobs share counts for each of them."""
        told = sum_of_ledgers(job.hours for job in self.jobs)
        if self.unallocated_hours is not None:
            told["unallocated"] = self.unallocated_hours
        return told

    @property
    def ofu_of_all_hours(self) -> float | None:
        """Mean OFU over the time with and without a job, as a share; None where the latter is not known."""
        if self.unallocated_hours is None or not (hours := self.device_hours + self.unallocated_hours):
            return None
        return (self.ofu_mean or 0.0) * self.device_hours / hours

    @property
    def mfu_share(self) -> float:
        """Share of the GPU hours of jobs whose jobs report MFU."""
        told = [(job.figures.device_hours, job.application.mfu is not None) for job in self.jobs]
        hours = math.fsum(one for one, _ in told)
        return math.fsum(one for one, reports in told if reports) / hours if hours else 0.0

    @property
    def users(self) -> tuple[UserTime, ...]:
        """GPU time by user and account, the most first; nothing where no user is known."""
        return time_by_user(self.jobs)

    @property
    def outliers(self) -> list[JobReport]:
        """Jobs whose MFU and OFU are too far apart, the farthest first."""
        found = [(abs(job.pair.points), job) for job in self.jobs if job.outlier and job.pair is not None]
        return [job for _, job in sorted(found, key=lambda one: -one[0])]


def fleet_report(
    fleet: FleetSamples,
    applications: Mapping[str, Application] | None = None,
    rule: OutlierRule | None = None,
    *,
    health: HealthSamples | None = None,
    unallocated_hours: float | None = None,
) -> FleetReport:
    """Make the report.

    Args:
        fleet: What `collect_fleet` read.
        applications: What the jobs say of themselves, by the name of the job.
        rule: When MFU and OFU of a job are too far apart.
        health: What `collect_gpu_health` read; without it GPUs are judged by their work and clocks alone.
        unallocated_hours: What `collect_unallocated` read.
    """
    applications, rule = applications or {}, rule or OutlierRule()
    jobs = []
    runs = fleet.runs()
    for base, of_name in runs.items():
        identity = None if fleet.names is None else fleet.names.identity(base)
        for name, seen in of_name.items():
            figures = job_figures(name, seen, fleet.start, fleet.end, fleet.step_s)
            application = applications.get(name, _NOTHING_KNOWN)
            gpus = application.gpus or figures.gpus
            hours = ledger_of_job(figures, start=fleet.start, end=fleet.end, step_s=fleet.step_s)
            jobs.append(JobReport(figures, application, gpus, identity=identity, hours=hours))
    jobs.sort(key=lambda job: (math.isnan(job.figures.start), job.figures.start, job.figures.job))
    regressions = sorted(_regressions(jobs), key=lambda one: -one.lost_gpus)
    pairs = [job.pair for job in jobs if job.pair is not None]
    devices, seconds, ofu_mean = _all_gpus(jobs, fleet)
    return FleetReport(
        fleet.start,
        fleet.end,
        fleet.step_s,
        tuple(_judged(job, rule, regressions) for job in jobs),
        devices,
        seconds / 3600,
        ofu_mean,
        agreement(pairs),
        agreement_by_gpus(pairs),
        tuple(regressions),
        (
            *fleet.notes,
            *_note_on_rare_samples(jobs, fleet.step_s),
            *_notes_on_samples(fleet, runs, applications),
            *_notes(jobs, runs, applications),
            *(health.notes if health is not None else ()),
        ),
        judge_gpus(jobs, health),
        unallocated_hours,
    )


def _all_gpus(jobs: Sequence[JobReport], fleet: FleetSamples) -> tuple[int, float, float | None]:
    """Return the number of devices, their time in seconds, and the mean OFU over it."""
    spans: defaultdict[tuple[str | None, ...], list[Span]] = defaultdict(list)
    for job in jobs:
        for device, span in zip(job.figures.devices, job.figures.spans, strict=True):
            spans[device.device.identity].append(span)
    told = [time_of_one_gpu(of_gpu, fleet.start, fleet.step_s) for of_gpu in spans.values()]
    seconds = math.fsum(length for length, _ in told)
    return len(spans), seconds, math.fsum(work for _, work in told) / seconds if seconds else None


def _regressions(jobs: Sequence[JobReport]) -> Iterator[Regression]:
    for job in jobs:
        figures = job.figures
        for drop in figures.drops:
            levels = drop.time_s, drop.before, drop.after
            detail = f"{job.gpus} GPUs"
            yield Regression(figures.job, "within the job", *levels, job.gpus, detail, drop.interval)
    yield from slower_than_earlier_jobs(
        [
            # The median: a restart begins with minutes of loading and compiling.
            JobLevel(job.figures.job, run, job.gpus, job.figures.start, job.figures.ofu.p50)
            for job in jobs
            if (run := job.run) is not None
            and job.figures.ofu is not None
            and job.figures.end - job.figures.start >= SHORTEST_JOB_S
        ]
    )


def _judged(job: JobReport, rule: OutlierRule, regressions: Sequence[Regression]) -> JobReport:
    pair = job.pair
    if pair is None or not (pair.mfu and pair.ofu):
        return replace(job, outlier=pair is not None and rule.holds(pair))
    usual = [one.before for one in regressions if one.job == job.figures.job]
    outlier = rule.holds(pair)
    if not outlier and not usual:
        return job
    facts = job.application.facts
    if usual:
        facts = replace(facts, usual_ofu=fmean(usual))
    if facts.device is None and (facts.work is not None or facts.peak_dtype is not None):
        facts = replace(facts, device=_known_model(job.figures))
    found = diagnose(pair.mfu, pair.ofu, facts).candidates
    return replace(job, outlier=outlier, candidates=tuple(one for one in found if one.fits))


def iso(time_s: float) -> str | None:
    """Return a Unix time as ISO 8601 in UTC, to the second; None for no time."""
    if time_s != time_s:
        return None
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _known_model(figures: JobFigures) -> str | None:
    """Return the model of all devices of a job, whose peaks by type may be unlike those of others."""
    # Imported here: reports of jobs that tell no types need no table.
    from hardware_table import lookup

    models = {device.device.model for device in figures.devices}
    model = models.pop() if len(models) == 1 else None
    return model if model is not None and lookup(model) is not None else None


def notes_on_intervals(jobs: Sequence[JobReport]) -> Iterator[str]:
    """Yield which jobs have OFU and no interval, and why; in the JSON each job has its reason."""
    lacking: defaultdict[str, list[str]] = defaultdict(list)
    for job in jobs:
        interval = job.figures.interval
        if interval is not None and interval.reason is not None:
            too_few = f"it takes {FEWEST_SAMPLES} steps with samples"
            lacking[too_few if interval.samples < FEWEST_SAMPLES else interval.reason].append(job.figures.job)
    for reason, names in lacking.items():
        yield f"{len(names)} jobs have no interval for OFU, as {reason}: {_some(names)}"


def _note_on_rare_samples(jobs: Sequence[JobReport], step_s: float) -> Iterator[str]:
    """Yield what a server that was asked every 30 s or less cannot give: scrapes that are rarer."""
    rare = [job.figures for job in jobs if rare_samples_note(job.figures.interval_s)]
    if rare and rare_samples_note(step_s) is None:
        note = rare_samples_note(max(figures.interval_s for figures in rare))
        yield f"{len(rare)} jobs are sampled too rarely: {_some([one.job for one in rare])}; {note}"


def _notes_on_samples(
    fleet: FleetSamples, runs: Mapping[str, Mapping[str, object]], applications: Mapping[str, Application]
) -> Iterator[str]:
    for wrong, refused in sorted(fleet.refused.items()):
        yield (
            f"{refused.samples} samples of {len(refused.jobs)} jobs {wrong} They are left out, such as "
            f"{refused.example}, of {_some(list(refused.jobs))}"
        )
    several = {name: list(of_name) for name, of_name in runs.items() if len(of_name) > 1}
    if several:
        yield (
            f"{len(several)} names stand for several jobs, told apart by gaps of more than "
            f"{fleet.run_gap_s / 60:g} minutes and by labels: "
            f"{_some([', '.join(names) for names in several.values()])}"
        )
    if unclear := [name for name in several if name in applications]:
        yield (
            f"MFU of {len(unclear)} names is not used, as each stands for several jobs: {_some(unclear)}; "
            f"name the job, such as {several[unclear[0]][0]}"
        )


def _notes(
    jobs: Sequence[JobReport], runs: Mapping[str, object], applications: Mapping[str, Application]
) -> Iterator[str]:
    if not applications:
        return
    for name, application in applications.items():
        yield from (f"job {name}: {note}" for note in application.notes)
    seen = {job.figures.job for job in jobs}
    unseen = [name for name in applications if name not in seen and name not in runs]
    if unseen:
        yield f"{len(unseen)} jobs report MFU and have no counters in this time: {_some(unseen)}"
    silent = [job.figures.job for job in jobs if job.application.mfu is None]
    if silent:
        yield f"{len(silent)} jobs have counters and report no MFU: {_some(silent)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_NOTE} more" if len(names) > _NAMES_IN_NOTE else ""
    return ", ".join(names[:_NAMES_IN_NOTE]) + more
