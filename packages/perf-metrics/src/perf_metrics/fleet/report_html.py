"""The report on a fleet as one HTML page with its plots; it loads nothing from other hosts."""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from html import escape
from importlib.resources import files
from itertools import zip_longest
from typing import TYPE_CHECKING

from .app_metrics import NEAR_POINTS
from .job_figures import JobFigures
from .regressions import Regression
from .report import FleetReport, JobReport, notes_on_intervals
from .report_text import (
    AGREEMENT_HEADER,
    agreement_row,
    certainty,
    fallen_points,
    number,
    points,
    share,
    share_with_interval,
    short_time,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Cell:
    """A cell: its text, what it is sorted by where that is not the text, and its classes."""

    text: str
    value: float | None = None
    css: str = ""


def text_cell(text: str) -> Cell:
    """Return a cell with text on the left."""
    return Cell(text, css="text")


def number_cell(value: float | None, fmt: str) -> Cell:
    """Return a cell with a number."""
    return Cell("", float("nan")) if value is None else Cell(format(value, fmt), value)


def share_cell(value: float | None) -> Cell:
    """Return a cell with a share in percent."""
    return number_cell(None if value is None else 100 * value, ".1f")


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], *, ids: Sequence[str] = (), sortable: bool = False
) -> str:
    """Return a table as HTML.

    Args:
        header: Names of the columns.
        rows: As many cells each.
        ids: Of the rows; none where empty.
        sortable: Whether the names are buttons for the page's script.
    """
    heads = "".join(
        _head(name, rows[0][index].css if rows else "", sortable) for index, name in enumerate(header)
    )
    names = [f' id="{escape(name)}"' for name in ids] or [""] * len(rows)
    body = "\n".join(
        f"<tr{name}>{''.join(map(_cell, row))}</tr>" for name, row in zip(names, rows, strict=True)
    )
    kind = ' class="sortable"' if sortable else ""
    return f"<table{kind}>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _head(name: str, css: str, sortable: bool) -> str:
    text = f'<button type="button">{escape(name)}</button>' if sortable else escape(name)
    return f"<th{_class(css)}>{text}</th>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f"<td{_class(cell.css)}{value}>{escape(cell.text)}</td>"


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


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

    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
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


MOST_JOB_PLOTS = 48
"""Jobs that are drawn over time: all that stand out, up to this number."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_JOB_COLUMNS = (
    "job", "run", "start, UTC", "hours", "GPUs", "devices", "OFU %", "p10", "p50", "p90", "imbalance %",
    "MFU %", "MFU-OFU", "MFU/OFU", "what stands out",
)  # fmt: skip


def report_as_html(report: FleetReport) -> str:
    """Return the report as the text of an HTML page.

    The page has the tables, a scatter plot of MFU over OFU, the error by number of GPUs, the fleet over time,
    the jobs that stand out over time, and all jobs in a table to sort and to search.

    Raises:
        ModuleNotFoundError: The extra `plot` is not installed.
    """
    title = f"OFU of {len(report.jobs)} jobs, {short_time(report.start)} to {short_time(report.end)} UTC"
    body = "\n".join(_body(report, title))
    points = [
        {"text": _point_text(job), "row": f"#{_row_id(job.figures.job)}"} for job in scatter_jobs(report)
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_file('report.css')}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="points">{_json(points)}</script>\n'
        f"<script>\n{_file('report.js')}</script>\n</body>\n</html>\n"
    )


def _body(report: FleetReport, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield (
        '<p class="soft">OFU = tensor pipe activity x SM clock / clock of the tensor peak, multiplied for '
        f"each sample (every {report.step_s:g} s) and then averaged: what the tensor cores did, whatever the "
        "job counts. ± is half of the 95 % confidence interval, in points.</p>"
    )
    yield _key_figures(report)
    if report.agreement is not None:
        yield from _agreement(report)
    yield f"<h2>The fleet over time</h2>\n<figure>{fleet_svg(report)}</figure>"
    yield from _standing_out(report)
    yield from _all_jobs(report)
    if told := [*report.notes, *notes_on_intervals(report.jobs)]:
        notes = "\n".join(f"<li>{escape(note)}</li>" for note in told)
        yield f"<h2>Notes</h2>\n<ul>\n{notes}\n</ul>"


def _key_figures(report: FleetReport) -> str:
    told = [
        (f"{len(report.jobs):,}", "jobs"),
        (f"{report.devices:,}", "devices"),
        (f"{report.device_hours:,.0f}", "device hours"),
        (f"{share(report.ofu_mean)} %", "mean OFU"),
        (str(len(report.outliers)), "MFU and OFU far apart"),
        (str(len(report.regressions)), "falls of OFU"),
    ]
    if report.agreement is not None:
        told.insert(4, (f"{report.agreement.mae_points:.1f}", "points, mean of |MFU - OFU|"))
        told.insert(5, (number(report.agreement.correlation, ".3f"), "correlation"))
    items = "\n".join(f"<li><b>{escape(figure)}</b>{escape(of)}</li>" for figure, of in told)
    return f'<ul class="figures">\n{items}\n</ul>'


def _agreement(report: FleetReport) -> Iterator[str]:
    total = [report.agreement] if report.agreement else []
    rows = [agreement_row(one) for one in (*report.buckets, *total)]
    cells = [[text_cell(row[0]), *map(Cell, row[1:])] for row in rows]
    yield "<h2>MFU against OFU</h2>"
    yield '<p class="soft">Each point is a job; point at one for its name, click for its row.</p>'
    pictures = "".join(f"<figure>{svg}</figure>" for svg in (scatter_svg(report), errors_svg(report)))
    yield f'<div class="row">{pictures}</div>'
    yield f'<div class="wide">{html_table(AGREEMENT_HEADER, cells)}</div>'


def _standing_out(report: FleetReport) -> Iterator[str]:
    jobs = _jobs_that_stand_out(report)
    if not jobs:
        return
    shown = jobs[:MOST_JOB_PLOTS]
    of = f", the first {len(shown)} of {len(jobs)}" if len(jobs) > len(shown) else ""
    yield f"<h2>Jobs that stand out ({len(jobs)})</h2>"
    yield (
        f'<p class="soft">OFU over time, averaged over the devices{of}. What may explain a difference are '
        "candidates whose arithmetic fits, not verdicts.</p>"
    )
    yield '<div class="jobs">'
    for job in shown:
        name = escape(job.figures.job)
        why = "<br>".join(escape(reason) for reason in what_stands_out(job, report))
        link = f'<b><a href="#{_row_id(job.figures.job)}">{name}</a></b>'
        interval = job.figures.interval
        ofu = "n/a" if interval is None else interval.in_percent()
        caption = f"{link}, {job.gpus} GPUs, OFU {ofu}, MFU {share(job.application.mfu)} %<br>{why}"
        yield f"<figure>{job_svg(job, report.step_s)}<figcaption>{caption}</figcaption></figure>"
    yield "</div>"


def _jobs_that_stand_out(report: FleetReport) -> list[JobReport]:
    by_name = {job.figures.job: job for job in report.jobs}
    fell = [by_name[one.job] for one in report.regressions]
    odd = [job for job in report.jobs if job.figures.odd_devices]
    # By turns, so that a cut leaves some of each kind.
    turns = zip_longest(fell, report.outliers, odd)
    return list({job.figures.job: job for turn in turns for job in turn if job is not None}.values())


def what_stands_out(job: JobReport, report: FleetReport) -> list[str]:
    """Return sentences about what is unusual about a job."""
    pair = job.pair
    told = []
    if job.outlier and pair is not None:
        told.append(f"MFU and OFU are {abs(pair.points):.1f} points apart: {points(job.difference)}")
    told += [f"{one.name}: {one.arithmetic}" for one in job.candidates]
    told += [
        f"OFU fell from {one.before:.1%} to {one.after:.1%} at {short_time(one.time_s)} "
        f"({one.kind}; {one.detail}), by {_fall_text(one)}"
        for one in report.regressions
        if one.job == job.figures.job
    ]
    told += [
        f"{odd.figures.device}: {odd.kind}, OFU {odd.figures.ofu:.1%}, tensor active "
        f"{odd.figures.tensor_activity:.1%}, {odd.figures.sm_mhz:.0f} MHz"
        for odd in job.figures.odd_devices
    ]
    return told


def _all_jobs(report: FleetReport) -> Iterator[str]:
    yield f"<h2>All jobs ({len(report.jobs)})</h2>"
    hint = "show rows with these words"
    yield f'<p><input id="filter" type="search" placeholder="{hint}" aria-label="{hint}"></p>'
    rows = [_job_row(job, report) for job in report.jobs]
    ids = [_row_id(job.figures.job) for job in report.jobs]
    yield f'<div class="wide" id="jobs">{html_table(_JOB_COLUMNS, rows, ids=ids, sortable=True)}</div>'


def _job_row(job: JobReport, report: FleetReport) -> list[Cell]:
    figures, pair, ofu = job.figures, job.pair, job.figures.ofu
    kinds = [one.name for one in job.candidates]
    kinds += [f"fell {one.kind}" for one in report.regressions if one.job == figures.job]
    kinds += [f"{odd.kind}: {odd.figures.device}" for odd in figures.odd_devices]
    if job.outlier and not job.candidates:
        kinds.append("far apart, no candidate fits")
    return [
        text_cell(figures.job),
        text_cell(job.run or ""),
        Cell(short_time(figures.start), figures.start),
        number_cell((figures.end - figures.start) / 3600, ".2f"),
        number_cell(job.gpus, "d"),
        number_cell(len(figures.devices), "d"),
        _interval_cell(ofu.mean, share_with_interval(ofu.mean, figures.interval))
        if ofu
        else share_cell(None),
        *(share_cell(value) for value in ((ofu.p10, ofu.p50, ofu.p90) if ofu else (None,) * 3)),
        share_cell(figures.imbalance),
        share_cell(job.application.mfu),
        number_cell(None, "") if pair is None else _interval_cell(pair.points / 100, points(job.difference)),
        number_cell(pair.mfu / pair.ofu if pair is not None and pair.ofu else None, ".2f"),
        Cell("; ".join(kinds), css="text long"),
    ]


def _interval_cell(share_value: float, text: str) -> Cell:
    """Return a cell that shows a figure with its interval and is sorted by the figure, in percent."""
    return Cell(text, 100 * share_value)


def _fall_text(one: Regression) -> str:
    told = {True: "certain", False: "not certain: the interval includes 0", None: certainty(one)}
    return f"{fallen_points(one)} points ({told[one.is_certain]})"


def _point_text(job: JobReport) -> str:
    pair = job.pair
    mfu, ofu = (math.nan, math.nan) if pair is None else (pair.mfu, pair.ofu)
    names = ", ".join(one.name for one in job.candidates)
    lines = [job.figures.job, f"{job.gpus} GPUs", f"MFU {mfu:.1%}, OFU {ofu:.1%}", names]
    return "\n".join(line for line in lines if line)


def _row_id(job: str) -> str:
    # A name may hold what an id or an address may not.
    return "job-" + job.encode().hex()


def _json(points: Sequence[dict[str, str]]) -> str:
    # Nothing in a name may end the script's element.
    return json.dumps(points).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("perf_metrics.fleet").joinpath("page", name).read_text(encoding="utf-8")
