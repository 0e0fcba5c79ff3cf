"""A fleet's report as one page: it needs nothing else, and asks no other host for anything."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest

from .html_table import Cell, html_table, number_cell, share_cell, text_cell
from .report import FleetReport, JobReport
from .report_plots import errors_svg, fleet_svg, job_svg, scatter_jobs, scatter_svg
from .report_text import AGREEMENT_HEADER, agreement_row, number, share, short_time

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
        "job counts.</p>"
    )
    yield _key_figures(report)
    if report.agreement is not None:
        yield from _agreement(report)
    yield f"<h2>The fleet over time</h2>\n<figure>{fleet_svg(report)}</figure>"
    yield from _standing_out(report)
    yield from _all_jobs(report)
    if report.notes:
        notes = "\n".join(f"<li>{escape(note)}</li>" for note in report.notes)
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
        mean = job.figures.ofu.mean if job.figures.ofu else None
        ofu, mfu = share(mean), share(job.application.mfu)
        caption = f"{link}, {job.gpus} GPUs, OFU {ofu} %, MFU {mfu} %<br>{why}"
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
        told.append(f"MFU and OFU are {abs(pair.points):.1f} points apart")
    told += [f"{one.name}: {one.arithmetic}" for one in job.candidates]
    told += [
        f"OFU fell from {one.before:.1%} to {one.after:.1%} at {short_time(one.time_s)} "
        f"({one.kind}; {one.detail})"
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
        text_cell(job.application.run or ""),
        Cell(short_time(figures.start), figures.start),
        number_cell((figures.end - figures.start) / 3600, ".2f"),
        number_cell(job.gpus, "d"),
        number_cell(len(figures.devices), "d"),
        *(share_cell(value) for value in ((ofu.mean, ofu.p10, ofu.p50, ofu.p90) if ofu else (None,) * 4)),
        share_cell(figures.imbalance),
        share_cell(job.application.mfu),
        number_cell(None if pair is None else pair.points, "+.1f"),
        number_cell(pair.mfu / pair.ofu if pair is not None and pair.ofu else None, ".2f"),
        Cell("; ".join(kinds), css="text long"),
    ]


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
