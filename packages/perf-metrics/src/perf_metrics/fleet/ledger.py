"""What the GPU time of a fleet was spent on, by its counters alone: work, waiting, GPUs that nobody has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from ..ofu.counter_files import TENSOR_NAMES
from .collect import check_labels
from .health_samples import counting_step, lookback, window
from .job_figures import JobFigures, weighted_percentiles
from .prometheus_api import Progress, PrometheusAPI, read_in_chunks

LedgerKind: TypeAlias = Literal[
    "working", "low clock", "stalled", "starting", "idle", "unknown", "unallocated"
]
LEDGER_KINDS: Sequence[LedgerKind] = get_args(LedgerKind)
LEDGER_MEANINGS: Mapping[LedgerKind, str] = {
    "working": "tensor cores of a job work",
    "low clock": "of that time, what a job loses while it waits for a slow GPU",
    "stalled": "nothing between two times of work: saving, data, a hang",
    "starting": "a job has GPUs and has not begun to work, also again",
    "idle": "a job keeps GPUs after its last work, or never worked",
    "unknown": "a job has GPUs, and activity or a clock is not known",
    "unallocated": "GPUs that no job has",
}

_WORKS = 0.2
"""Share of the level of a job from which on it works. While it saves or waits, OFU is a few percent of it as
a rule; a step of the report that is half a stall is one of work."""
_LEVEL_AT = 0.99
"""Percentile of its OFU over time that is the level of a job: it may do nothing for most of its time."""
LEAST_LEVEL = 0.001
"""OFU below which a job has no level: its GPUs do nothing with their tensor cores."""
_LEAST_GAP_STEPS = 4
"""Steps without a sample of a job after which it starts again; less is a scrape that failed."""
_STALL_S = 900.0
"""Seconds without work at the end of the range that are no more than a stall of a job that still runs."""


def ledger_of_job(figures: JobFigures, *, start: float, end: float, step_s: float) -> dict[LedgerKind, float]:
    """Return the hours of a job's GPUs by kind: `figures.device_hours`, and those without a figure.

    Told by OFU over time, averaged over its GPUs: the counters know no checkpoints. A job that computes
    without tensor cores is idle here.

    Args:
        figures: Of the job.
        start: Start of the range, Unix time in seconds; what began before does not start in it.
        end: End of the range; what still runs there may work again.
        step_s: Seconds between the steps of its series.
    """
    hours: dict[LedgerKind, float] = dict.fromkeys(LEDGER_KINDS[:-1], 0.0)
    spacing = figures.interval_s if math.isfinite(figures.interval_s) else step_s
    hours["unknown"] = figures.left_out * spacing / 3600
    if not len(figures.times):
        return hours
    (level,) = weighted_percentiles(figures.series, figures.gpu_seconds, (_LEVEL_AT,))
    least = _WORKS * level if level >= LEAST_LEVEL else math.inf
    works = [bool(ofu >= least) for ofu in figures.series]
    last = max((place for place, at_work in enumerate(works) if at_work), default=-1)
    times = figures.times
    edge = max(spacing, step_s)
    last_worked = times[last] if last >= 0 else times[0]
    if end - times[-1] <= edge and times[-1] - last_worked <= _STALL_S:
        last = len(works)  # it still runs: there may be work after the range
    starting, before = times[0] - start > edge, times[0]
    gap_s = _LEAST_GAP_STEPS * edge
    for place, (time_s, seconds) in enumerate(zip(times, figures.gpu_seconds, strict=True)):
        starting = starting or time_s - before > gap_s
        before = time_s
        if works[place]:
            starting = False
        kind: LedgerKind = "working" if works[place] else "starting" if starting else "stalled"
        hours["idle" if place > last else kind] += float(seconds) / 3600
    lost = hours["working"] * _lost_to_low_clock(figures)
    hours["working"] -= lost
    hours["low clock"] = lost
    return hours


def _lost_to_low_clock(figures: JobFigures) -> float:
    """Return the share of a job's work that the slowest of its GPUs costs all of them."""
    longest = max((device.seconds for device in figures.devices), default=0.0)
    shares = (
        (1 - one.share) * min(1.0, one.figures.seconds / longest)
        for one in figures.odd_devices
        if one.kind == "slow clock"
    )
    return max(shares, default=0.0)


def sum_of_ledgers(ledgers: Iterable[Mapping[LedgerKind, float]]) -> dict[LedgerKind, float]:
    """Return the hours of several by kind."""
    told = list(ledgers)
    return {kind: math.fsum(one.get(kind, 0.0) for one in told) for kind in LEDGER_KINDS[:-1]}


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

    They are counted by the server, a step apart or, of a day and more, every five minutes; each GPU by its
    UUID, one with slices as its slices. One that was scraped within two and a half scrape intervals is there,
    so that a scrape that failed does not count, and each change of jobs by so much less.

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
    back_s = lookback(server, TENSOR_NAMES, selector, start, end, step_s)
    look_s = counting_step(start, end, step_s)
    query = unallocated_query(job_labels, selector, back_s)
    counts: dict[float, float] = {}

    def read(first: float, last: float) -> int:
        answer = server.query_range(query, first, last, look_s)
        for series in answer:
            counts.update((time_s, float(text)) for time_s, text in series.points)
        return sum(len(series.points) for series in answer)

    read_in_chunks(read, start + look_s, end, look_s, progress)
    return math.fsum(counts.values()) * look_s / 3600


def unallocated_query(job_labels: Sequence[str], selector: str, back_s: float) -> str:
    """Return the expression for the number of devices that are scraped and have no job."""

    def devices(*matchers: str) -> str:
        names = f'__name__=~"{"|".join(TENSOR_NAMES)}"'
        told = ",".join([names, 'UUID!=""', *matchers, *([selector] if selector else [])])
        return f"group by (UUID, GPU_I_ID) (last_over_time({{{told}}}[{window(back_s)}]))"

    check_labels(job_labels)
    with_job = devices(*(f'{label}!=""' for label in job_labels))
    of_slices = f"""({devices('GPU_I_ID=""')} and on (UUID) {devices('GPU_I_ID!=""')})"""
    return f"count({devices()} unless {with_job} unless {of_slices})"
