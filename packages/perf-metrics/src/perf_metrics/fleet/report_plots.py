"""The pictures of the page on a fleet, as SVG."""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING

from .app_metrics import NEAR_POINTS
from .job_figures import JobFigures
from .ledger import LEDGER_KINDS, LedgerKind
from .report import FleetReport, JobReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


POINTS_ID = "job-points"
"""Id of the group in the scatter plot that has one element for each job, in the order of `scatter_jobs`."""

_USUAL, _OUTLIER, _FELL, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#5f6368"
_NEAR = "#eef1f4"
_TIME_BUCKETS = 240


def scatter_jobs(report: FleetReport) -> list[JobReport]:
    """Return the jobs of the scatter plot: those with MFU and OFU."""
    return [job for job in report.jobs if job.pair is not None]


def scatter_svg(report: FleetReport) -> str:
    """Return MFU over OFU, one point a job, its area by the number of GPUs."""
    jobs = scatter_jobs(report)
    fell = {one.job for one in report.regressions}
    figure = _figure(7.2, 5.4)
    axes = figure.subplots()
    pairs = [job.pair for job in jobs if job.pair is not None]
    most = 1.08 * max((max(pair.mfu, pair.ofu) for pair in pairs), default=0.5) * 100
    near = ([-NEAR_POINTS, most - NEAR_POINTS], [NEAR_POINTS, most + NEAR_POINTS])
    axes.fill_between([0, most], *near, color=_NEAR, lw=0)
    axes.plot([0, most], [0, most], color=_GREY, lw=1)
    points = axes.scatter(
        [100 * pair.ofu for pair in pairs],
        [100 * pair.mfu for pair in pairs],
        s=[10 + 6 * math.log2(pair.gpus) for pair in pairs],
        c=[_colour(job, fell) for job in jobs],
        alpha=0.75,
        lw=0,
        zorder=3,
    )
    points.set_gid(POINTS_ID)
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="OFU, %", ylabel="MFU as reported, %")
    _legend(axes)
    _finish(axes)
    return _svg(figure, "scatter")


def errors_svg(report: FleetReport) -> str:
    """Return the mean of |MFU - OFU| by number of GPUs, with its standard deviation."""
    buckets = report.buckets
    figure = _figure(7.2, 0.8 + 0.32 * len(buckets))
    axes = figure.subplots()
    places = range(len(buckets))
    means = [one.mae_points for one in buckets]
    spreads = [one.sd_points or 0 for one in buckets]
    axes.barh(places, means, xerr=spreads, color=_USUAL, ecolor=_GREY, height=0.62)
    axes.set_yticks(places, [f"{one.gpus} GPUs ({one.jobs})" for one in buckets])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("mean of |MFU - OFU| and its standard deviation, points")
    _finish(axes)
    return _svg(figure, "errors")


def fleet_svg(report: FleetReport) -> str:
    """Return the fleet's mean OFU and the number of devices with a job, over time."""
    times, ofu, devices = _fleet_series(report)
    figure = _figure(10.5, 4.2)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    upper.plot(times, ofu, color=_USUAL, lw=1.3)
    upper.set_ylabel("mean OFU, %")
    lower.fill_between(times, devices, step="mid", color=_GREY, alpha=0.35, lw=0)
    lower.set_ylabel("devices")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        _finish(axes)
    _time_axis(lower)
    return _svg(figure, "fleet")


_KIND_COLOURS: dict[LedgerKind, str] = {
    "working": _USUAL,
    "low clock": _OUTLIER,
    "stalled": "#E69F00",
    "starting": "#56B4E9",
    "idle": _FELL,
    "unknown": "#000000",
    "unallocated": "#c9ced3",
}


def hours_svg(report: FleetReport) -> str:
    """Return what GPU time was spent on, as one bar from 0 to 100 %."""
    hours, left = report.hours, 0.0
    total = sum(hours.values()) or 1.0
    figure = _figure(10.5, 1.3)
    axes = figure.subplots()
    for kind in LEDGER_KINDS:
        share = 100 * hours.get(kind, 0.0) / total
        if share:
            label = f"{kind} {share:.1f} %"
            axes.barh([0], [share], left=left, color=_KIND_COLOURS[kind], height=0.8, label=label)
            left += share
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.set_xlabel("share of GPU time, %")
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=7)
    _finish(axes)
    return _svg(figure, "hours")


def job_svg(job: JobReport, step_s: float) -> str:
    """Return OFU of one job over time, sampled every so many seconds, with its MFU and its falls."""
    figures = job.figures
    figure = _figure(5.2, 2.0)
    axes = figure.subplots()
    times, ofu = _with_gaps(figures, step_s)
    axes.plot(_dates(times), ofu, color=_USUAL, lw=1.1, label="OFU")
    if job.application.mfu is not None:
        axes.axhline(100 * job.application.mfu, color=_OUTLIER, lw=1.2, ls=(0, (4, 2)), label="MFU")
    for drop in figures.drops:
        axes.axvline(_dates([drop.time_s])[0], color=_FELL, lw=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.95), ncols=2)
    _finish(axes)
    _time_axis(axes)
    return _svg(figure, figures.job)


def _with_gaps(figures: JobFigures, step_s: float) -> tuple[list[float], list[float]]:
    """Return times and OFU in percent, with no number between samples that are far apart."""
    times, values, before = [], [], math.inf
    spacing = max(step_s, figures.interval_s) if math.isfinite(figures.interval_s) else step_s
    for time, ofu in zip(figures.times, figures.series, strict=True):
        if time - before > 2.5 * spacing:
            times.append(before + spacing)
            values.append(math.nan)
        times.append(time)
        values.append(100 * ofu)
        before = time
    return times, values


def _fleet_series(report: FleetReport) -> tuple[list[float], list[float], list[float]]:
    """Return times, mean OFU in percent and mean number of devices, in buckets of whole steps."""
    width = report.step_s * max(1, math.ceil((report.end - report.start) / report.step_s / _TIME_BUCKETS))
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for job in report.jobs:
        figures = job.figures
        for time, ofu, seconds in zip(figures.times, figures.series, figures.gpu_seconds, strict=True):
            bucket = sums[int((time - report.start) // width)]
            bucket[0] += ofu * seconds
            bucket[1] += seconds
    count = int((report.end - report.start) // width) + 1
    rows = [sums.get(index, [0.0, 0.0]) for index in range(count)]
    times = _dates([report.start + (index + 0.5) * width for index in range(count)])
    means = [100 * work / seconds if seconds else math.nan for work, seconds in rows]
    return times, means, [seconds / width for _, seconds in rows]


def _colour(job: JobReport, fell: set[str]) -> str:
    if job.figures.job in fell:
        return _FELL
    return _OUTLIER if job.outlier else _USUAL


def _legend(axes: Axes) -> None:
    for colour, label in ((_USUAL, "near"), (_OUTLIER, "far apart"), (_FELL, "OFU fell")):
        axes.scatter([], [], color=colour, lw=0, label=label)
    axes.fill_between([], [], color=_NEAR, label="within 10 points")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _dates(times: Sequence[float]) -> list[float]:
    """Return Unix times as matplotlib's dates, days since the same epoch."""
    return [time / 86400 for time in times]


def _time_axis(axes: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=UTC)
    axes.xaxis.set_major_formatter(formatter)


def _finish(axes: Axes) -> None:
    axes.grid(True, color="#e3e5e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelsize=9)


def _figure(width: float, height: float) -> Figure:
    # Not pyplot, which keeps figures and may want a screen.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, salt: str) -> str:
    from matplotlib import rc_context

    page = io.StringIO()
    # Text stays text; ids depend on the salt, so that those of two pictures in one page differ.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(page, format="svg", metadata={"Date": None})
    svg = page.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
