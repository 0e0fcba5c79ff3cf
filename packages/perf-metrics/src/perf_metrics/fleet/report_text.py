"""A fleet's report for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..display.text_table import text_table
from .agreement import Agreement
from .job_figures import OddDevice
from .regressions import Regression
from .report import FleetReport, JobReport
from .report_json import iso

AGREEMENT_HEADER = ("GPUs", "jobs", "MFU %", "sd", "OFU %", "|MFU-OFU|", "sd", "within 10", "beyond 20", "r")
_MOST_ROWS = 20
_LONGEST_NAME = 60


def report_as_text(report: FleetReport) -> str:
    """Return the report as tables."""
    sections = [_summary(report), _agreement(report), *_findings(report), _lowest(report), *_notes(report)]
    return "\n\n".join(section for section in sections if section)


def share(value: float | None) -> str:
    """Return a share as a percentage with one decimal, without the sign."""
    return "n/a" if value is None else f"{100 * value:.1f}"


def number(value: float | None, fmt: str = ".1f") -> str:
    """Return a number, or what stands for none."""
    return "n/a" if value is None else format(value, fmt)


def plain(text: str) -> str:
    """Return a name as a terminal can show it: one line, no control characters, not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
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
        f"{share(report.ofu_mean)} %"
    )


def _agreement(report: FleetReport) -> str:
    if report.agreement is None:
        return "No job has both MFU and OFU, so there is nothing to compare (--mfu FILE, --mfu-query)."
    rows = [agreement_row(one) for one in (*report.buckets, report.agreement)]
    return f"MFU against OFU, in percentage points\n{text_table(AGREEMENT_HEADER, rows)}"


def _findings(report: FleetReport) -> Iterator[str]:
    outliers = report.outliers
    if outliers:
        header = ("job", "GPUs", "MFU %", "OFU %", "MFU/OFU", "candidates (not verdicts)")
        yield _table("MFU and OFU far apart", header, [_outlier(job) for job in outliers], left=(0, 5))
    if report.regressions:
        rows = [_regression(one) for one in report.regressions]
        yield _table("OFU fell", ("job", "since", "from %", "to %", "against"), rows, left=(0, 1, 4))
    if odd := [(job.figures.job, one) for job in report.jobs for one in job.figures.odd_devices]:
        rows = [_odd_device(name, one) for name, one in odd]
        header = ("job", "kind", "OFU %", "tensor active %", "SM MHz", "device")
        yield _table("Devices unlike the others of their job", header, rows, left=(0, 1, 5))


def _outlier(job: JobReport) -> tuple[str, ...]:
    pair = job.pair
    mfu, ofu = (None, None) if pair is None else (pair.mfu, pair.ofu)
    ratio = mfu / ofu if mfu is not None and ofu else None
    return (
        plain(job.figures.job),
        str(job.gpus),
        share(mfu),
        share(ofu),
        number(ratio, ".2f"),
        "; ".join(one.name for one in job.candidates) or "none fits: look at a profiler trace",
    )


def _regression(one: Regression) -> tuple[str, ...]:
    against = f"{one.kind}; {one.detail}"
    return plain(one.job), short_time(one.time_s), share(one.before), share(one.after), against


def _odd_device(job: str, one: OddDevice) -> tuple[str, ...]:
    device = one.figures
    clock = f"{device.sm_mhz:.0f}"
    return (
        plain(job),
        one.kind,
        share(device.ofu),
        share(device.tensor_activity),
        clock,
        plain(str(device.device)),
    )


def _lowest(report: FleetReport) -> str:
    told = [(job.figures.ofu, job) for job in report.jobs if job.figures.ofu is not None]
    # Where most could be won: devices x hours x what is missing.
    told.sort(key=lambda one: -one[1].figures.device_hours * (1 - min(1.0, one[0].mean)))
    rows = [
        (
            plain(job.figures.job),
            str(job.gpus),
            f"{job.figures.device_hours:.1f}",
            share(ofu.mean),
            share(ofu.p10),
            share(ofu.p50),
            share(ofu.p90),
            number(None if job.figures.imbalance is None else 100 * job.figures.imbalance),
        )
        for ofu, job in told[:10]
    ]
    header = ("job", "GPUs", "device hours", "OFU %", "p10", "p50", "p90", "imbalance %")
    return _table("Where most GPU time goes without tensor work", header, rows) if rows else ""


def _notes(report: FleetReport) -> Iterator[str]:
    if report.notes:
        yield "Notes\n" + "\n".join(f"- {_note(note)}" for note in report.notes)


def _note(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...] = (0,)
) -> str:
    more = len(rows) - _MOST_ROWS
    table = text_table(header, rows[:_MOST_ROWS], left=left)
    return f"{title} ({len(rows)})\n{table}" + (
        f"\nand {more} more; see --json or --html" if more > 0 else ""
    )
