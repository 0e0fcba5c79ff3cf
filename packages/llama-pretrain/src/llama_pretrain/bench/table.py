"""The tables of `bench`: what was measured, and apart from it what others have published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .contenders import CONTENDERS
from .published import Published
from .summary import Spread, Summary

_HEADING = (
    "measured here",
    "tokens/s",
    "step ms (low to high)",
    "CPU ms",
    "MFU",
    "peak memory",
    "speed over torch",
)
_PUBLISHED = ("published", "on", "how", "tokens/s per GPU", "MFU", "source")


def measured_table(summaries: Mapping[str, Summary], failures: Mapping[str, str]) -> str:
    """Return a row for each contender; one that failed has none, but its reason below."""
    rows = [_HEADING, *(_row(name, summary) for name, summary in summaries.items())]
    reasons = [f"{CONTENDERS[name].label} failed: {reason}" for name, reason in failures.items()]
    return "\n".join([*_aligned(rows, left=1), *reasons])


def published_table(rows: Sequence[Published]) -> str:
    """Return a row for each published figure, each marked as such."""
    cells = [
        (row.model, row.device, row.how, f"{row.tokens_per_second:,.0f}", _share(row.mfu), row.source)
        for row in rows
    ]
    return "\n".join(_aligned([_PUBLISHED, *cells], left=3))


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    step, over = summary.step_ms, summary.over_torch
    return (
        CONTENDERS[name].label,
        f"{summary.tokens_per_second.median:,.0f}",
        f"{step.median:.1f} ({step.low:.1f} to {step.high:.1f})",
        f"{summary.cpu_ms.median:.1f}",
        _share(summary.mfu.median if summary.mfu else None),
        "n/a" if summary.peak_memory_bytes is None else f"{summary.peak_memory_bytes / 2**20:,.0f} MiB",
        "n/a" if over is None else _ratio(over),
    )


def _ratio(over: Spread) -> str:
    return f"{over.median:.3f} ({over.low:.3f} to {over.high:.3f})"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The first cells to the left, numbers to the right, a last cell of words to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left or not _is_number(rows[-1][column]) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _is_number(cell: str) -> bool:
    return cell == "n/a" or cell[:1].isdigit()
