"""What the GPU time of a fleet was spent on, by its counters alone: work, waiting, GPUs that nobody has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from ..ofu.counter_files import TENSOR_NAMES
from .collect import activity_query
from .health_samples import window
from .job_figures import JobFigures, weighted_percentiles
from .prometheus_api import Progress, PrometheusAPI, read_in_chunks

LedgerKind: TypeAlias = Literal["working", "low clock", "stalled", "starting", "idle", "unallocated"]
LEDGER_KINDS: Sequence[LedgerKind] = get_args(LedgerKind)
LEDGER_MEANINGS: Mapping[LedgerKind, str] = {
    "working": "a job's tensor cores work",
    "low clock": "of that time, what all GPUs of a job lose while they wait for one with a low clock",
    "stalled": "a job does next to nothing between two times of work: saving, evaluation, data, a hang",
    "starting": "a job has GPUs and has not begun to work: loading, compiling; also after a restart",
    "idle": "a job keeps GPUs after its last work, or never worked",
    "unallocated": "GPUs that are scraped and that no job has",
}

_WORKS = 0.2
"""Share of the level of a job from which on it works. While it saves or waits, OFU is a few percent of it as
a rule; a step of the report that is half a stall is one of work."""
_LEVEL_AT = 0.9
"""Percentile of its OFU over time that is the level of a job: it may do nothing for most of its time."""
LEAST_LEVEL = 0.001
"""OFU below which a job has no level: its GPUs do nothing with their tensor cores."""
_LEAST_GAP_STEPS = 4
"""Steps without a sample of a job after which it starts again; less is a scrape that failed."""


def ledger_of_job(
    figures: JobFigures, *, step_s: float, begins_before: bool = False
) -> dict[LedgerKind, float]:
    """Return the hours of a job's GPUs by kind; they add up to `figures.device_hours`.

    Told by OFU over time, averaged over its GPUs: the counters know no checkpoints. A job that computes
    without tensor cores is idle here.

    Args:
        figures: Of the job.
        step_s: Seconds between the steps of its series.
        begins_before: Whether it began before the range, so that its first steps are no start.
    """
    hours: dict[LedgerKind, float] = dict.fromkeys(LEDGER_KINDS[:-1], 0.0)
    if not figures.times:
        return hours
    (level,) = weighted_percentiles(figures.series, figures.gpu_seconds, (_LEVEL_AT,))
    least = _WORKS * level if level >= LEAST_LEVEL else math.inf
    works = [ofu >= least for ofu in figures.series]
    last = max((place for place, at_work in enumerate(works) if at_work), default=-1)
    starting, before = not begins_before, figures.times[0]
    for place, (time_s, seconds) in enumerate(zip(figures.times, figures.gpu_seconds, strict=True)):
        if time_s - before > _LEAST_GAP_STEPS * step_s:
            starting = True
        before = time_s
        if works[place]:
            starting = False
        kind: LedgerKind = (
            "working" if works[place] else "idle" if place > last else "starting" if starting else "stalled"
        )
        hours[kind] += float(seconds) / 3600
    lost = hours["working"] * _lost_to_low_clock(figures)
    hours["working"] -= lost
    hours["low clock"] = lost
    return hours


def _lost_to_low_clock(figures: JobFigures) -> float:
    """Return the share of a job's work that the slowest of its GPUs costs all of them."""
    slow = {
        one.figures.device.identity: one.figures for one in figures.odd_devices if one.kind == "slow clock"
    }
    others = [device for device in figures.devices if device.device.identity not in slow]
    longest = max((device.seconds for device in figures.devices), default=0.0)
    usual = _median([device.sm_mhz for device in others if device.sm_mhz > 0])
    if not slow or not longest or not usual:
        return 0.0
    shares = (max(0.0, 1 - one.sm_mhz / usual) * min(1.0, one.seconds / longest) for one in slow.values())
    return max(shares)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def sum_of_ledgers(ledgers: Iterable[Mapping[LedgerKind, float]]) -> dict[LedgerKind, float]:
    """Return the hours of several by kind."""
    told = list(ledgers)
    return {kind: math.fsum(one.get(kind, 0.0) for one in told) for kind in LEDGER_KINDS}


def collect_unallocated(
    server: PrometheusAPI,
    start: float,
    end: float,
    *,
    job_labels: Sequence[str] = ("hpc_job",),
    selector: str = "",
    step_s: float = 30.0,
    progress: Progress = lambda seconds: None,
) -> float:
    """Return the hours of GPUs and MIG slices that were scraped without a job between two times.

    They are counted by the server, a step apart. A GPU with slices counts as its slices.

    Args:
        server: Where dcgm-exporter's series are.
        start: Unix time in seconds.
        end: Unix time in seconds, after `start`.
        job_labels: Labels that name a job together; a device that lacks one of them has none.
        selector: Further matchers for the series, such as `cluster="a"`.
        step_s: Seconds between scrapes.
        progress: Called with the seconds of the range that have been read more.

    Raises:
        ValueError: A label is not the name of one.
        PrometheusError: The server did not give all of it.
    """
    query = unallocated_query(job_labels, selector, step_s)
    counts: dict[float, float] = {}

    def read(first: float, last: float) -> int:
        answer = server.query_range(query, first, last, step_s)
        for series in answer:
            counts.update((time_s, float(text)) for time_s, text in series.points)
        return sum(len(series.points) for series in answer)

    read_in_chunks(read, start + step_s, end, step_s, progress)
    return math.fsum(counts.values()) * step_s / 3600


def unallocated_query(job_labels: Sequence[str], selector: str, step_s: float) -> str:
    """Return the expression for the number of devices that are scraped and have no job."""

    def devices(*matchers: str) -> str:
        names = f'__name__=~"{"|".join(TENSOR_NAMES)}"'
        told = ",".join([names, *([selector] if selector else []), *matchers])
        return f"group by (UUID, GPU_I_ID) (last_over_time({{{told}}}[{window(step_s)}]))"

    with_job = f"group by (UUID, GPU_I_ID) ({activity_query(job_labels, selector, step_s)})"
    of_slices = f"""({devices('GPU_I_ID=""')} and on (UUID) {devices('GPU_I_ID!=""')})"""
    return f"count({devices()} unless {with_job} unless {of_slices})"
