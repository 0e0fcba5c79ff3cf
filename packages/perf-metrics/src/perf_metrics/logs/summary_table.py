"""Summaries of runs as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from ..display.format import format_value
from .log_entry import JsonValue
from .summary import RunSummary

MISSING = "n/a"


def summary_lines(summaries: Sequence[RunSummary]) -> list[str]:
    """Return a table with one row for each run; figures that a log does not tell are "n/a"."""
    rows = [_cells(summary) for summary in summaries]
    headers = list(rows[0]) if rows else []
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in headers}

    def line(cells: dict[str, str]) -> str:
        first, *others = headers
        aligned = [cells[first].ljust(widths[first]), *(cells[name].rjust(widths[name]) for name in others)]
        return "  ".join(aligned).rstrip()

    return [line({header: header for header in headers}), *map(line, rows)] if rows else []


def summary_json(summary: RunSummary) -> dict[str, JsonValue]:
    """Return a summary as plain JSON data, with null for what is missing or no number."""
    return {key: _plain(value) for key, value in asdict(summary).items()}


def _cells(run: RunSummary) -> dict[str, str]:
    best = _text(run.best_eval_loss, ".4f")
    return {
        "run": run.name,
        "steps": _text(run.steps, ",d"),
        "tokens": _text(run.tokens, "si"),
        "loss": _text(run.final_loss, ".4f"),
        "last 10%": _text(run.final_loss_mean, ".4f"),
        "best eval": best if run.best_eval_step is None else f"{best} @ {run.best_eval_step:,}",
        "tok/s": _text(run.tok_per_sec_median, "si"),
        "p10": _text(run.tok_per_sec_p10, "si"),
        "p90": _text(run.tok_per_sec_p90, "si"),
        "MFU": _text(run.mfu_median, ".1%"),
        "HFU": _text(run.hfu_median, ".1%"),
        "peak memory": _text(run.peak_memory_bytes, "gib"),
        "data wait": _text(run.data_wait_share, ".1%"),
        "wall": _duration(run.wall_seconds),
        "pauses": _pauses(run),
        "resumes": _text(run.resumes, "d"),
    }


def _text(value: float | None, fmt: str) -> str:
    return MISSING if value is None else format_value(value, fmt)


def _pauses(run: RunSummary) -> str:
    return f"{run.pauses} of {_duration(run.pause_seconds)}" if run.pauses else _text(run.pauses, "d")


def _duration(seconds: float | None) -> str:
    """Return a time in its two largest units: 12.3s, 4m37s, 1h02m, 2d03h."""
    if seconds is None:
        return MISSING
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _plain(value: object) -> JsonValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int) else str(value)
