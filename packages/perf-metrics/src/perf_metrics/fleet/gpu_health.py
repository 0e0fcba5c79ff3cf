"""Which GPUs of a fleet to take out: errors, low clocks and too little work, by UUID and over jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from ..ofu.samples import Device
from .health_samples import SIGNALS, HealthSamples, Identity, Level, Signal
from .job_figures import OddKind
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
"""Jobs, of unlike runs, in which a GPU does less than its peers before that is taken for its own fault: in
one, the work may be uneven."""
_REPEATED_XID = 3
"""The same for XID errors that are the application's fault as a rule."""
_AFTER_AN_XID_S = 120.0
"""Seconds after the last sample of a job that an XID error may have ended."""
_JOBS_NAMED = 3
_LEVEL_OF_XID: Mapping[XidMeaning, Level] = {
    "hardware": "take out",
    "memory": "watch",
    "unknown": "watch",
    "application": "note",
    "driver": "note",
}
_LOW_CLOCK = 0.75
"""Share of the median clock of its model over the fleet below which a busy GPU is slow, whatever its job:
jobs of unlike power draw have unlike clocks (H100 under load: 1201 to 1558 MHz in one job, OFU paper)."""
_FEWEST_GPUS = 8
_LEAST_REASON_HOURS = 0.1
_BUSY = 0.05
"""Mean tensor activity from which on the clock of a job's GPU is one under load."""


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
    devices = {**(health.devices if health is not None else {}), **history.devices}
    found = (
        GPUHealth(
            devices[identity],
            tuple(sorted(told, key=lambda one: (LEVELS.index(one.level), -one.lost_hours))),
            history.hours(identity),
            len({stay.job for stay in history.stays[identity]}),
        )
        for identity, told in evidence.items()
    )
    return tuple(sorted(found, key=lambda one: (*one.rank, str(one.device))))


@dataclass(frozen=True)
class _Stay:
    """A GPU in a job: its times in Unix seconds, hours, clock in MHz and tensor activity."""

    job: str
    run: str
    first_s: float
    last_s: float
    hours: float
    mhz: float
    activity: float


@dataclass
class _History:
    """The jobs of each GPU, and where it was unlike the others."""

    devices: dict[Identity, Device] = field(default_factory=dict)
    stays: defaultdict[Identity, list[_Stay]] = field(default_factory=lambda: defaultdict(list))
    odd: defaultdict[tuple[Identity, OddKind], list[tuple[_Stay, str, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By GPU and kind: where, what was seen, and the GPU hours lost."""

    @classmethod
    def of(cls, jobs: Sequence[JobReport]) -> _History:
        found = cls()
        for job in jobs:
            figures = job.figures
            odd = {one.figures.device.identity: one.kind for one in figures.odd_devices}
            usual = _usual(job)
            for one, span in zip(figures.devices, figures.spans, strict=True):
                whole = Device(one.device.host, one.device.index, one.device.uuid, one.device.model)
                hours = one.seconds / 3600
                stay = _Stay(
                    figures.job,
                    job.run or figures.job.partition("#")[0],
                    float(span.times[0]),
                    float(span.times[-1]),
                    hours,
                    one.sm_mhz,
                    one.tensor_activity,
                )
                found.devices[whole.identity] = whole
                found.stays[whole.identity].append(stay)
                kind = odd.get(one.device.identity)
                if kind is None:
                    continue
                mhz, ofu = usual[one.device.model, one.device.mig_profile]
                if kind == "slow clock":
                    lost = figures.gpus * hours * (1 - one.sm_mhz / mhz)
                    text = f"{one.sm_mhz:.0f} MHz where the others have {mhz:.0f}"
                else:
                    lost = hours * (1 - one.ofu / ofu)
                    text = f"OFU {one.ofu:.1%} where the others have {ofu:.1%}"
                found.odd[whole.identity, kind].append((stay, text, lost))
        return found

    def hours(self, identity: Identity) -> float:
        return math.fsum(stay.hours for stay in self.stays[identity])

    def jobs_at(self, identity: Identity, time_s: float, margin_s: float) -> list[_Stay]:
        """Return which jobs had the GPU at a time, or until shortly before."""
        return [
            stay
            for stay in self.stays[identity]
            if stay.first_s - margin_s <= time_s <= stay.last_s + margin_s
        ]


def _usual(job: JobReport) -> dict[tuple[str | None, str | None], tuple[float, float]]:
    """Return the median clock in MHz and OFU of each model in a job."""
    models: defaultdict[tuple[str | None, str | None], list[tuple[float, float]]] = defaultdict(list)
    for one in job.figures.devices:
        models[one.device.model, one.device.mig_profile].append((one.sm_mhz, one.ofu))
    return {
        model: (median(mhz for mhz, _ in told), median(ofu for _, ofu in told))
        for model, told in models.items()
    }


def _odd_in_jobs(history: _History) -> Iterator[tuple[Identity, Evidence]]:
    for (identity, kind), seen in history.odd.items():
        most = max(seen, key=lambda one: one[2])
        lost = math.fsum(one[2] for one in seen)
        runs = len({stay.run for stay, _, _ in seen})
        in_jobs = f"in {len(seen)} of its {len(history.stays[identity])} jobs: {most[1]}"
        if kind == "slow clock":
            level: Level = "take out"
            text = f"{in_jobs}; all GPUs of a job wait for its slowest, about {lost:,.1f} GPU hours"
        else:
            level = "take out" if runs >= _REPEATED else "watch"
            why = "" if runs >= _REPEATED else "; is the work uneven (stages of a pipeline, experts)?"
            text = f"{in_jobs}{why}"
        jobs = tuple(dict.fromkeys(stay.job for stay, _, _ in seen))
        yield identity, Evidence(kind, level, text, lost_hours=lost, jobs=jobs)


def _low_clocks(history: _History) -> Iterator[tuple[Identity, Evidence]]:
    models: defaultdict[str | None, dict[Identity, float]] = defaultdict(dict)
    for identity, stays in history.stays.items():
        busy = [stay for stay in stays if stay.activity >= _BUSY and stay.hours]
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
            one = _grown(signal, values, health) if signal.grows else _set(signal, values, health)
            if one is not None:
                stays = history.jobs_at(identity, one.first_s or 0.0, health.window_s)
                jobs = tuple(dict.fromkeys(stay.job for stay in stays))
                yield identity, Evidence(one.kind, one.level, one.text, one.first_s, jobs=jobs)
    for reason, gpus in health.reason_hours.items():
        for identity, (hours, first_s) in gpus.items():
            if hours >= _LEAST_REASON_HOURS:
                text = f"for {hours:.1f} h; are cooling and power of its node right?"
                yield identity, Evidence(reason, "watch", text, first_s)


def _grown(signal: Signal, values: Mapping[float, float], health: HealthSamples) -> Evidence | None:
    total, most, first_s = 0.0, 0.0, None
    times = sorted(values)
    for earlier, later in pairwise(times):
        # After a restart of the driver it counts from 0.
        more = values[later] - (values[earlier] if values[later] >= values[earlier] else 0.0)
        if more > 0:
            total += more
            most = max(most, more / (later - earlier))
            first_s = earlier if first_s is None else first_s
    if total <= 0 or most < signal.least_per_s:
        return None
    fails = most >= signal.fails_per_s or values[times[-1]] >= signal.fails_at
    rate = f", {60 * most:,.1f} a minute in the worst hour" if total > 1 else ""
    return Evidence(signal.kind, "take out" if fails else signal.level, f"{total:,.0f} more{rate}", first_s)


def _set(signal: Signal, values: Mapping[float, float], health: HealthSamples) -> Evidence | None:
    if not values:
        return None
    since = min(values) - health.window_s
    text = "since before this range" if since <= health.start else "in this range"
    return Evidence(signal.kind, signal.level, text, since)


def _xid_errors(health: HealthSamples, history: _History) -> Iterator[tuple[Identity, Evidence]]:
    for identity, events in health.xids.items():
        seen: defaultdict[int, list[tuple[float, list[_Stay]]]] = defaultdict(list)
        for time_s, code in events:
            seen[code].append((time_s, history.jobs_at(identity, time_s, _AFTER_AN_XID_S)))
        blamed = {
            stay.run
            for code, told in seen.items()
            if xid_error(code).meaning == "application"
            for _, stays in told
            for stay in stays
        }
        for code, told in seen.items():
            error = xid_error(code)
            jobs = tuple(dict.fromkeys(stay.job for _, stays in told for stay in stays))
            often = "once" if len(told) == 1 else f"{len(told)} times"
            in_jobs = f", in {', '.join(jobs[:_JOBS_NAMED])}" if jobs else ""
            repeated = error.meaning == "application" and len(blamed) >= _REPEATED_XID
            why = f"; such errors in {len(blamed)} unlike jobs point at the GPU" if repeated else ""
            level: Level = "watch" if repeated else _LEVEL_OF_XID[error.meaning]
            text = f"{error.text}{error.told_action}, {often}{in_jobs}{why}"
            yield identity, Evidence(f"XID {code}", level, text, told[0][0], jobs=jobs)
    for identity, code in health.earlier_xids.items():
        error = xid_error(code)
        if error.meaning == "hardware":
            text = f"{error.text}{error.told_action}, before this range"
            yield identity, Evidence(f"XID {code}", "note", text, health.start)
