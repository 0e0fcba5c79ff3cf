"""Which GPUs of a fleet to take out: errors, low clocks and too little work, by UUID and over jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ..ofu.samples import Device
from .health_samples import SIGNALS, HealthSamples, Identity, Level, Signal
from .job_figures import BUSY, OddDevice, OddKind
from .xid_errors import XidMeaning, xid_error

if TYPE_CHECKING:
    from .report import JobReport

LEVELS: Sequence[Level] = ("take out", "watch", "note")
"""The most serious first."""


@dataclass(frozen=True)
class Evidence:
    """What speaks against a GPU.

    Attributes:
        kind: Such as "XID 79", "slow clock" or "NVLink replays".
        level: "take out": it needs a reset, a repair, or costs others their time. "watch": it may become so.
            "note": as a rule not the GPU's fault.
        text: What was seen, with its figures.
        first_s: Unix time in seconds at which it was first seen; None where it is a mean over jobs.
        lost_hours: GPU hours that it cost, of all that waited for it; 0 where that cannot be told.
        jobs: In which jobs it was seen.
    """

    kind: str
    level: Level
    text: str
    first_s: float | None = None
    lost_hours: float = 0.0
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class GPUHealth:
    """A GPU that something speaks against.

    Attributes:
        device: Which one, as it was last called.
        evidence: What speaks against it, the most serious first.
        job_hours: Hours that it had jobs in the range.
        jobs: Number of these jobs.
    """

    device: Device
    evidence: tuple[Evidence, ...]
    job_hours: float
    jobs: int

    @property
    def level(self) -> Level:
        """That of the most serious evidence."""
        return self.evidence[0].level

    @property
    def lost_hours(self) -> float:
        """GPU hours that it cost."""
        return math.fsum(one.lost_hours for one in self.evidence)

    @cached_property
    def rank(self) -> tuple[float, ...]:
        """What it is sorted by: the level, what it cost, and how much speaks against it."""
        most = sum(one.level == self.level for one in self.evidence)
        return LEVELS.index(self.level), -self.lost_hours, -most, -self.job_hours


_REPEATED = 2
"""Unlike runs in which a GPU does less than its peers before that is taken for its own fault: in one, the
work may be uneven, and jobs of which no run is known may be one."""
_REPEATED_XID = 3
"""The same for XID errors that are the application's fault as a rule."""
_NOT_USED = 0.05
"""Share of its peers' work below which a GPU is not used, rather than slow."""
_LEAST_HOURS = 1 / 6
"""Of a GPU in a job, before it is compared with the others."""
_AFTER_AN_XID_S = 120.0
"""Seconds after the last sample of a job that an XID error may have ended."""
_JOBS_NAMED = 3
_LEVEL_OF_XID: Mapping[XidMeaning, Level] = {
    "hardware": "take out",
    "memory": "watch",
    "another": "watch",
    "unknown": "watch",
    "application": "note",
    "driver": "note",
}
_LOW_CLOCK = 0.75
"""Share of the median clock of its model over the fleet below which a busy GPU is slow, whatever its job:
jobs of unlike power draw have unlike clocks (H100 under load: 1201 to 1558 MHz in one job, OFU paper)."""
_FEWEST_GPUS = 8
_LEAST_REASON_HOURS = 0.1


def judge_gpus(jobs: Sequence[JobReport], health: HealthSamples | None = None) -> tuple[GPUHealth, ...]:
    """Return the GPUs that something speaks against, those to take out first.

    A GPU is its UUID: what it did in all of its jobs counts together. A slice counts for its GPU.

    Args:
        jobs: Of a report.
        health: What the counters of health say; without it, clocks and work are all that is judged.
    """
    history = _History.of(jobs)
    evidence: defaultdict[Identity, list[Evidence]] = defaultdict(list)
    for identity, one in (*_odd_in_jobs(history), *_low_clocks(history)):
        evidence[identity].append(one)
    if health is not None:
        for identity, one in (*_errors(health, history), *_xid_errors(health, history)):
            evidence[identity].append(one)
    called = {**history.devices, **(health.devices if health is not None else {})}
    found = (
        GPUHealth(
            called.get(identity) or Device(uuid=identity[0]),
            tuple(sorted(told, key=lambda one: (LEVELS.index(one.level), -one.lost_hours))),
            math.fsum(stay.hours for stay in history.stays[identity].values()),
            len(history.stays[identity]),
        )
        for identity, told in evidence.items()
    )
    return tuple(sorted(found, key=lambda one: (*one.rank, str(one.device))))


@dataclass(frozen=True)
class _Stay:
    """A GPU in a job: its times in Unix seconds, hours, clock in MHz and tensor activity."""

    job: str
    run: str | None
    first_s: float
    last_s: float
    hours: float
    mhz: float
    activity: float


@dataclass(frozen=True)
class _Odd:
    """Where a GPU was unlike the others: what was seen, and the GPU hours lost."""

    stay: _Stay
    share: float
    text: str
    lost_hours: float


@dataclass
class _History:
    """The jobs of each GPU, and where it was unlike the others, by the job's name; of slices the worst."""

    devices: dict[Identity, Device] = field(default_factory=dict)
    stays: defaultdict[Identity, dict[str, _Stay]] = field(default_factory=lambda: defaultdict(dict))
    odd: defaultdict[tuple[Identity, OddKind], dict[str, _Odd]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    @classmethod
    def of(cls, jobs: Sequence[JobReport]) -> _History:
        found = cls()
        for job in jobs:
            odd = {one.figures.device.identity: one for one in job.figures.odd_devices}
            for one, span in zip(job.figures.devices, job.figures.spans, strict=True):
                device = one.device
                whole = Device(device.host, device.index, device.uuid, device.model)
                times = float(span.times[0]), float(span.times[-1])
                stay = _Stay(
                    job.figures.job, job.run, *times, one.seconds / 3600, one.sm_mhz, one.tensor_activity
                )
                found.devices[whole.identity] = whole
                known = found.stays[whole.identity].get(stay.job, stay)
                found.stays[whole.identity][stay.job] = max(known, stay, key=lambda each: each.hours)
                if (unlike := odd.get(device.identity)) is not None and stay.hours >= _LEAST_HOURS:
                    found._add(whole.identity, unlike, stay, job)
        return found

    def _add(self, identity: Identity, unlike: OddDevice, stay: _Stay, job: JobReport) -> None:
        one, missing = unlike.figures, 1 - unlike.share
        if unlike.kind == "slow clock":
            # Of as many GPUs as the job had at a time, slices for a share of one.
            text = f"{one.sm_mhz:.0f} MHz, {unlike.share:.0%} of the clock of the others"
            seen = _Odd(stay, unlike.share, text, job.figures.gpus * stay.hours * missing)
        else:
            text = f"OFU {one.ofu:.1%}, {unlike.share:.0%} of that of the others"
            seen = _Odd(stay, unlike.share, text, stay.hours * missing)
        known = self.odd[identity, unlike.kind].get(stay.job, seen)
        self.odd[identity, unlike.kind][stay.job] = max(known, seen, key=lambda each: each.lost_hours)

    def jobs_between(self, identity: Identity, first_s: float, last_s: float) -> list[_Stay]:
        """Return which jobs had the GPU at a time between two."""
        stays = self.stays[identity].values()
        return [stay for stay in stays if stay.first_s <= last_s and first_s <= stay.last_s]


def _odd_in_jobs(history: _History) -> Iterator[tuple[Identity, Evidence]]:
    for (identity, kind), by_job in history.odd.items():
        seen = list(by_job.values())
        most = max(seen, key=lambda one: one.lost_hours)
        lost = math.fsum(one.lost_hours for one in seen)
        in_jobs = f"in {len(seen)} of its {len(history.stays[identity])} jobs: {most.text}"
        runs = {one.stay.run for one in seen if one.stay.run is not None}
        level: Level = "watch"
        if kind == "slow clock":
            level = "take out"
            text = f"{in_jobs}; all GPUs of a job wait for its slowest, about {lost:,.1f} GPU hours"
        elif most.share < _NOT_USED:
            text = f"{in_jobs}; is it used at all?"
        elif len(runs) >= _REPEATED:
            level, text = "take out", f"{in_jobs}; {len(runs)} unlike runs"
        else:
            text = f"{in_jobs}; is the work uneven (stages of a pipeline, experts)?"
        jobs = tuple(one.stay.job for one in seen)
        yield identity, Evidence(kind, level, text, lost_hours=lost, jobs=jobs)


def _low_clocks(history: _History) -> Iterator[tuple[Identity, Evidence]]:
    models: defaultdict[str | None, dict[Identity, float]] = defaultdict(dict)
    for identity, stays in history.stays.items():
        busy = [stay for stay in stays.values() if stay.activity >= BUSY and stay.hours >= _LEAST_HOURS]
        if busy:
            hours = math.fsum(stay.hours for stay in busy)
            mean = math.fsum(stay.mhz * stay.hours for stay in busy) / hours
            models[history.devices[identity].model][identity] = mean
    for model, clocks in models.items():
        usual = median(clocks.values())
        for identity, mhz in clocks.items() if len(clocks) >= _FEWEST_GPUS else ():
            if mhz < _LOW_CLOCK * usual and (identity, "slow clock") not in history.odd:
                text = f"{mhz:.0f} MHz under load where the median of all {model} is {usual:.0f}"
                yield identity, Evidence("low clock", "watch", text)


def _errors(health: HealthSamples, history: _History) -> Iterator[tuple[Identity, Evidence]]:
    for signal in SIGNALS:
        for identity, values in health.values.get(signal.kind, {}).items():
            one = _grown(signal, values) if signal.grows else _set(signal, values, health)
            if one is None:
                continue
            jobs: tuple[str, ...] = ()
            if one.first_s is not None:
                stays = history.jobs_between(identity, one.first_s, one.first_s + health.window_s)
                jobs = tuple(stay.job for stay in stays)
            yield identity, replace(one, jobs=jobs)
    for reason, gpus in health.reason_hours.items():
        for identity, (hours, first_s) in gpus.items():
            if hours >= _LEAST_REASON_HOURS:
                text = f"for {hours:.1f} h; are cooling and power of its node right?"
                yield identity, Evidence(reason, "watch", text, first_s)


def _grown(signal: Signal, values: Mapping[float, float]) -> Evidence | None:
    times = sorted(values)
    told = _without_dips([values[time] for time in times], persists=signal.persists)
    total, most, first_s = 0.0, 0.0, None
    for (earlier, later), (before, now) in zip(pairwise(times), pairwise(told), strict=True):
        # After a restart of the driver it counts from 0.
        more = now - (before if now >= before else 0.0)
        if more > 0:
            total += more
            most = max(most, more / (later - earlier))
            first_s = earlier if first_s is None else first_s
    fails = most >= signal.fails_per_s or told[-1] >= signal.fails_at
    level: Level = "take out" if fails else signal.level
    if total > 0 and most >= signal.least_per_s:
        rate = f", {60 * most:,.1f} a minute at most" if total > 1 and most >= 0.1 / 60 else ""
        return Evidence(signal.kind, level, f"{total:,.0f} more{rate}", first_s)
    # Not more than before the range, and too many.
    return Evidence(signal.kind, level, f"{told[-1]:,.0f} in all, from before") if fails else None


def _without_dips(values: Sequence[float], *, persists: bool) -> list[float]:
    """Return the values of a counter without readings that fall and come back; of one that stays, all."""
    told: list[float] = []
    for place, value in enumerate(values):
        before = told[-1] if told else value
        comes_back = persists or max(values[place:]) >= before
        told.append(max(before, value) if comes_back else value)
    return told


def _set(signal: Signal, values: Mapping[float, float], health: HealthSamples) -> Evidence | None:
    if not values:
        return None
    since, until = min(values) - health.window_s, max(values)
    if health.end - until > health.window_s / 2:
        return Evidence(signal.kind, "note", "in this range, and not at its end", since)
    before = since - health.start < health.window_s / 2
    text = "since before this range or its first hour" if before else "since a time in this range"
    return Evidence(signal.kind, signal.level, text, None if before else since)


def _xid_errors(health: HealthSamples, history: _History) -> Iterator[tuple[Identity, Evidence]]:
    seen: defaultdict[Identity, defaultdict[int, list[tuple[float, list[_Stay]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for identity, events in health.xids.items():
        for time_s, code in events:
            stays = history.jobs_between(identity, time_s - _AFTER_AN_XID_S, time_s)
            seen[identity][code].append((time_s, [stay for stay in stays if stay.first_s <= time_s]))
    for identity, counted in health.counted_xids.items():
        for code, first_s in counted.items():
            if code not in seen[identity]:  # hidden by another error in the gauge
                stays = history.jobs_between(identity, first_s, first_s + health.window_s)
                seen[identity][code].append((first_s, stays))
    for identity, codes in seen.items():
        runs = {
            stay.run or stay.job
            for code, told in codes.items()
            if xid_error(code).meaning == "application"
            for _, stays in told
            for stay in stays
        }
        for code, told in codes.items():
            yield identity, _xid_evidence(code, told, len(runs))
    for identity, code in health.earlier_xids.items():
        error = xid_error(code)
        if error.meaning == "hardware":
            text = f"{error.text}{error.told_action}, before this range or before it was seen in it"
            yield identity, Evidence(f"XID {code}", "watch", text)


def _xid_evidence(code: int, told: Sequence[tuple[float, list[_Stay]]], runs: int) -> Evidence:
    error = xid_error(code)
    jobs = tuple(dict.fromkeys(stay.job for _, stays in told for stay in stays))
    often = "once" if len(told) == 1 else f"{len(told)} times"
    in_jobs = f", in {', '.join(jobs[:_JOBS_NAMED])}" if jobs else ""
    repeated = error.meaning == "application" and runs >= _REPEATED_XID
    why = f"; such errors in {runs} unlike jobs point at the GPU" if repeated else ""
    level: Level = "watch" if repeated else _LEVEL_OF_XID[error.meaning]
    return Evidence(
        f"XID {code}", level, f"{error.text}{error.told_action}, {often}{in_jobs}{why}", told[0][0], jobs=jobs
    )
