"""The report on a fleet as text: tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from ..display import text_table
from ..uncertainty import MeanInterval, plus_minus
from .app_metrics import Agreement
from .gpu_health import GPUHealth
from .job_figures import OddDevice
from .ledger import LEDGER_KINDS, LEDGER_MEANINGS
from .regressions import Regression
from .report import FleetReport, JobReport, iso, notes_on_intervals

AGREEMENT_HEADER = ("GPUs", "jobs", "MFU %", "sd", "OFU %", "|MFU-OFU|", "sd", "within 10", "beyond 20", "r")
PLUS_MINUS = "\n± is half of the 95 % confidence interval, in points"
_MOST_ROWS = 20
_LONGEST_NAME = 60
_WIDTH = 100


def report_as_text(report: FleetReport, price: float | None = None) -> str:
    """Return the report as tables.

    Args:
        report: The report.
        price: Of one GPU hour, for costs by user.
    """
    sections = [
        _summary(report),
        _hours(report, price),
        _users(report, price),
        _gpus(report),
        _agreement_section(report),
        *_findings(report),
        _lowest(report),
    ]
    if notes := [*report.notes, *notes_on_intervals(report.jobs)]:
        sections.append("Notes\n" + "\n".join(f"- {_printable(note)}" for note in notes))
    return "\n\n".join(section for section in sections if section)


def share(value: float | None) -> str:
    """Return a share as a percentage with one decimal, without the sign."""
    return "n/a" if value is None else f"{100 * value:.1f}"


def share_with_interval(value: float | None, interval: MeanInterval | None) -> str:
    """Return a share in percent with its interval, "31.2 (± 0.4)"; without one "31.2"."""
    if value is None or interval is None or interval.half_width is None:
        return share(value)
    return f"{share(value)} ({plus_minus(100 * interval.half_width)})"


def points(difference: MeanInterval | None) -> str:
    """Return a difference of shares in points with its interval, "+9.9 (± 0.4)"."""
    return "n/a" if difference is None else difference.in_points()


def fallen_points(one: Regression) -> str:
    """Return by how many points OFU fell, with the interval: "9.9 (± 0.4)"."""
    return share(one.before - one.after) if one.interval is None else one.interval.in_points(sign="")


def certainty(one: Regression) -> str:
    """Return whether a fall is more than chance: "yes", "no: includes 0", or that it cannot be told."""
    return {True: "yes", False: "no: includes 0", None: "no interval"}[one.is_certain]


def number(value: float | None, fmt: str = ".1f") -> str:
    """Return a number, or what stands for none."""
    return "n/a" if value is None else format(value, fmt)


def plain(text: str) -> str:
    """Return a name as a terminal can show it: one line, no control characters, not too long."""
    shown = _printable(text)
    return shown if len(shown) <= _LONGEST_NAME else shown[: _LONGEST_NAME - 3] + "..."


def short_time(time_s: float) -> str:
    """Return a Unix time to the minute, in UTC."""
    return (iso(time_s) or "n/a")[:16].replace("T", " ")


def agreement_row(one: Agreement) -> tuple[str, ...]:
    """Return a row of the table of agreement."""
    return (
        one.gpus,
        str(one.jobs),
        share(one.mfu_mean),
        share(one.mfu_sd),
        share(one.ofu_mean),
        number(one.mae_points),
        number(one.sd_points),
        f"{one.within_10:.1%}",
        f"{one.beyond_20:.1%}",
        number(one.correlation, ".3f"),
    )


def _summary(report: FleetReport) -> str:
    samples = sum(job.figures.samples for job in report.jobs)
    return (
        f"{short_time(report.start)} to {short_time(report.end)} UTC, every {report.step_s:g} s: "
        f"{len(report.jobs)} jobs on {report.devices} devices, {samples:,} samples, mean OFU "
        f"{share(report.ofu_mean)} %; {report.mfu_share:.0%} of the GPU time reports MFU"
    ) + (PLUS_MINUS if any(job.figures.interval is not None for job in report.jobs) else "")


def _hours(report: FleetReport, price: float | None) -> str:
    told = report.hours
    total = sum(told.values())
    if not total:
        return ""
    rows = [
        [
            kind,
            f"{told[kind]:,.1f}",
            f"{told[kind] / total:.1%}",
            *([] if price is None else [f"{price * told[kind]:,.2f}"]),
            LEDGER_MEANINGS[kind],
        ]
        for kind in LEDGER_KINDS
        if kind in told
    ]
    header = ["GPU time", "hours", "share", *([] if price is None else ["cost"]), "what it is"]
    table = text_table(header, rows, left=(0, len(header) - 1))
    if report.ofu_of_all_hours is not None:
        table += f"\nOFU of all GPUs, with and without a job: {share(report.ofu_of_all_hours)} %"
    return f"What GPU time was spent on\n{table}"


def _gpus(report: FleetReport) -> str:
    told = [one for one in report.gpus if one.level != "note"]
    if not told:
        return ""
    rest = len(report.gpus) - min(len(told), _MOST_ROWS)
    more = f"\nand {rest} more, some with notes only; see --json" if rest else ""
    return f"GPUs to look at ({len(told)})\n" + "\n".join(map(_gpu_text, told[:_MOST_ROWS])) + more


def _gpu_text(one: GPUHealth) -> str:
    lost = f", {one.lost_hours:,.1f} GPU hours lost" if one.lost_hours else ""
    uuid = f" ({plain(one.device.uuid)})" if one.device.uuid else ""
    lines = [f"{one.level}: {plain(str(one.device))}{uuid}{lost}"]
    for each in one.evidence:
        text = _printable(f"{each.kind}: {each.text}")
        lines += wrap(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines)


def _users(report: FleetReport, price: float | None) -> str:
    if not report.users:
        return ""
    header = [
        "user",
        "account",
        "jobs",
        "GPU hours",
        "OFU %",
        "MFU told",
        "without work",
        *([] if price is None else ["cost"]),
    ]
    rows = [
        [
            plain(one.user),
            plain(one.account or ""),
            str(one.jobs),
            f"{one.device_hours:,.1f}",
            share(one.ofu),
            f"{one.mfu_share:.0%}",
            f"{one.hours_without_work:,.1f}",
            *([] if price is None else [f"{price * one.device_hours:,.2f}"]),
        ]
        for one in report.users
    ]
    table = _table("GPU time by user", header, rows, left=(0, 1))
    shared = sum(one.device_hours for one in report.users) > 1.001 * report.device_hours
    slices = any(device.device.is_slice for job in report.jobs for device in job.figures.devices)
    if shared or slices:
        table += "\nA slice counts as a GPU, and a GPU that jobs share for each of them."
    return table


def _agreement_section(report: FleetReport) -> str:
    if report.agreement is None:
        return "No job has both MFU and OFU, so there is nothing to compare (--mfu FILE, --mfu-query)."
    rows = [agreement_row(one) for one in (*report.buckets, report.agreement)]
    return f"MFU against OFU, in percentage points\n{text_table(AGREEMENT_HEADER, rows)}"


def _findings(report: FleetReport) -> Iterator[str]:
    outliers = report.outliers
    if outliers:
        header = ("job", "GPUs", "MFU %", "OFU %", "MFU-OFU", "MFU/OFU", "candidates (not verdicts)")
        yield _table("MFU and OFU far apart", header, [_outlier(job) for job in outliers], left=(0, 6))
    if report.regressions:
        rows = [_regression_row(one) for one in report.regressions]
        header = ("job", "since", "from %", "to %", "by points", "certain", "against")
        yield _table("OFU fell", header, rows, left=(0, 1, 5, 6))
    if odd := [(job.figures.job, one) for job in report.jobs for one in job.figures.odd_devices]:
        rows = [_odd_device_row(name, one) for name, one in odd]
        columns = ("job", "kind", "OFU %", "tensor active %", "SM MHz", "device")
        yield _table("Devices unlike the others of their job", columns, rows, left=(0, 1, 5))


def _outlier(job: JobReport) -> tuple[str, ...]:
    mfu, ofu = job.application.mfu, job.compared_ofu
    ratio = mfu / ofu if mfu is not None and ofu else None
    return (
        plain(job.figures.job),
        str(job.gpus),
        share(mfu),
        share(ofu),
        points(job.difference),
        number(ratio, ".2f"),
        "; ".join(one.name for one in job.candidates) or "none fits: look at a profiler trace",
    )


def _regression_row(one: Regression) -> tuple[str, ...]:
    levels = share(one.before), share(one.after), fallen_points(one)
    against = f"{one.kind}; {one.detail}"
    return plain(one.job), short_time(one.time_s), *levels, certainty(one), against


def _odd_device_row(job: str, one: OddDevice) -> tuple[str, ...]:
    device = one.figures
    figures = share(device.ofu), share(device.tensor_activity), f"{device.sm_mhz:.0f}"
    return plain(job), one.kind, *figures, plain(str(device.device))


def _lowest(report: FleetReport) -> str:
    told = [(job.figures.ofu, job) for job in report.jobs if job.figures.ofu is not None]
    # Where most could be won: devices x hours x what is missing.
    told.sort(key=lambda one: -one[1].figures.device_hours * (1 - min(1.0, one[0].mean)))
    rows = [
        (
            plain(job.figures.job),
            str(job.gpus),
            f"{job.figures.device_hours:.1f}",
            share_with_interval(ofu.mean, job.figures.interval),
            *map(share, (ofu.p10, ofu.p50, ofu.p90)),
            number(None if job.figures.imbalance is None else 100 * job.figures.imbalance),
        )
        for ofu, job in told[:10]
    ]
    header = ("job", "GPUs", "device hours", "OFU %", "p10", "p50", "p90", "imbalance %")
    return _table("Where most GPU time goes without tensor work", header, rows) if rows else ""


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...] = (0,)
) -> str:
    more = len(rows) - _MOST_ROWS
    table = text_table(header, rows[:_MOST_ROWS], left=left)
    return f"{title} ({len(rows)})\n{table}" + (
        f"\nand {more} more; see --json or --html" if more > 0 else ""
    )
