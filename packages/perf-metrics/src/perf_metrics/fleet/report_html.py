"""The report on a fleet as one HTML page with its plots; it loads nothing from other hosts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import zip_longest

from .ledger import LEDGER_KINDS, LEDGER_MEANINGS
from .regressions import Regression
from .report import FleetReport, JobReport, notes_on_intervals
from .report_plots import errors_svg, fleet_svg, hours_svg, job_svg, scatter_jobs, scatter_svg
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


MOST_GPUS = 200
"""GPUs that the page has; the JSON has all."""
MOST_JOB_PLOTS = 48
"""Jobs that are drawn over time: all that stand out, up to this number."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_JOB_COLUMNS = (
    "job", "run", "start, UTC", "hours", "GPUs", "devices", "OFU %", "p10", "p50", "p90", "imbalance %",
    "MFU %", "MFU-OFU", "MFU/OFU", "r over time", "without work %", "what stands out",
)  # fmt: skip


def report_as_html(report: FleetReport, price: float | None = None) -> str:
    """Return the report as the text of an HTML page.

    The page has the tables, a scatter plot of MFU over OFU, the error by number of GPUs, the fleet over time,
    the jobs that stand out over time, what GPU time was spent on, GPUs to look at, and all jobs in a table to
    sort and to search.

    Args:
        report: The report.
        price: Of one GPU hour, for costs.

    Raises:
        ModuleNotFoundError: The extra `plot` is not installed.
    """
    title = f"OFU of {len(report.jobs)} jobs, {short_time(report.start)} to {short_time(report.end)} UTC"
    body = "\n".join(_body(report, title, price))
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


def _body(report: FleetReport, title: str, price: float | None) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield (
        '<p class="soft">OFU = tensor pipe activity x SM clock / clock of the tensor peak, multiplied for '
        f"each sample (every {report.step_s:g} s) and then averaged: what the tensor cores did, whatever the "
        "job counts. ± is half of the 95 % confidence interval, in points.</p>"
    )
    yield _key_figures(report)
    yield from _gpu_time(report, price)
    yield from _gpus(report)
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
        (f"{report.mfu_share:.0%}", "of their hours report MFU"),
        (str(len(report.outliers)), "MFU and OFU far apart"),
        (str(len(report.regressions)), "falls of OFU"),
    ]
    if report.agreement is not None:
        told.insert(5, (f"{report.agreement.mae_points:.1f}", "points, mean of |MFU - OFU|"))
        told.insert(6, (number(report.agreement.correlation, ".3f"), "correlation"))
    items = "\n".join(f"<li><b>{escape(figure)}</b>{escape(of)}</li>" for figure, of in told)
    return f'<ul class="figures">\n{items}\n</ul>'


def _gpu_time(report: FleetReport, price: float | None) -> Iterator[str]:
    hours = report.hours
    total = sum(hours.values())
    if not total:
        return
    yield f"<h2>What GPU time was spent on</h2>\n<figure>{hours_svg(report)}</figure>"
    if report.ofu_of_all_hours is not None:
        yield (
            '<p class="soft">OFU of all GPUs, with and without a job: '
            f"{share(report.ofu_of_all_hours)} %. The hours are by the counters alone, which know no "
            "checkpoints; a GPU that jobs share counts for each.</p>"
        )
    cost = [] if price is None else ["cost"]
    rows = [
        [
            text_cell(kind),
            number_cell(hours[kind], ",.1f"),
            share_cell(hours[kind] / total),
            *([] if price is None else [number_cell(price * hours[kind], ",.2f")]),
            text_cell(LEDGER_MEANINGS[kind]),
        ]
        for kind in LEDGER_KINDS
        if kind in hours
    ]
    yield html_table(("GPU time", "hours", "%", *cost, "what it is"), rows)
    if not report.users:
        return
    columns = ("user", "account", "jobs", "GPU hours", "OFU %", "MFU told %", "without work, h", *cost)
    users = [
        [
            text_cell(one.user),
            text_cell(one.account or ""),
            number_cell(one.jobs, "d"),
            number_cell(one.device_hours, ",.1f"),
            share_cell(one.ofu),
            share_cell(one.mfu_share),
            number_cell(one.hours_without_work, ",.1f"),
            *([] if price is None else [number_cell(price * one.device_hours, ",.2f")]),
        ]
        for one in report.users
    ]
    yield f"<h2>GPU time by user ({len(users)})</h2>"
    yield f'<div class="wide">{html_table(columns, users, sortable=True)}</div>'


def _gpus(report: FleetReport) -> Iterator[str]:
    told = [one for one in report.gpus if one.level != "note"]
    if not told:
        return
    rows = [
        [
            text_cell(str(one.device)),
            text_cell(one.device.uuid or ""),
            text_cell(one.level),
            number_cell(one.lost_hours or None, ",.1f"),
            number_cell(one.jobs, "d"),
            Cell("; ".join(f"{each.kind}: {each.text}" for each in one.evidence), css="text long"),
        ]
        for one in told[:MOST_GPUS]
    ]
    more = f", the first {len(rows)} of {len(told)}" if len(told) > len(rows) else ""
    yield f"<h2>GPUs to look at ({len(told)})</h2>"
    yield (
        f'<p class="soft">By UUID, over all jobs{more}; those to take out first, and of these what cost '
        "most. Lost are the GPU hours of all that waited.</p>"
    )
    header = ("GPU", "UUID", "what to do", "lost hours", "jobs", "why")
    yield f'<div class="wide">{html_table(header, rows, sortable=True)}</div>'


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
        mfu = "" if job.application.mfu is None else f", MFU {share(job.application.mfu)} %"
        caption = f"{link}, {job.gpus} GPUs, OFU {ofu}{mfu}<br>{why}"
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
        number_cell(job.correlation, ".2f"),
        share_cell(_without_work(job)),
        Cell("; ".join(kinds), css="text long"),
    ]


def _without_work(job: JobReport) -> float | None:
    total = math.fsum(job.hours.values())
    return 1 - job.hours["working"] / total if total else None


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
