"""What can be drawn: the panels of the picture, and which of them a log has figures for."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .run_log import RunLog, Series

CurveStyle = Literal["line", "points", "dashed", "dotted"]


@dataclass(frozen=True)
class Curve:
    """One key of the log entries in a panel."""

    key: str
    meaning: str
    """Its text in the legend."""
    style: CurveStyle = "line"
    scale: float = 1.0
    """Values are multiplied by it."""
    band: bool = False
    """Whether the range over the ranks is drawn behind the line, which is that of the largest."""
    smoothed: bool = False
    """Whether smoothing is for this curve."""
    beside: str | None = None
    """A key whose curve would hide this one where all their values are equal; it is then left out."""

    def series(self, run: RunLog) -> Series:
        """Return what is to be drawn of a run, before scaling."""
        series = run.series(self.key)
        hidden = self.beside is not None and run.series(self.beside) == series
        return Series((), ()) if hidden else series


def tick_text(value: float) -> str:
    """Return a short text for a number on an axis: 2.5, 5e-4, 12K, 1.5M."""
    size = abs(value)
    if 0 < size < 0.01:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for suffix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= unit:
            return f"{value / unit:.6g}{suffix}"
    return f"{value:.6g}"


def percent_text(value: float) -> str:
    """Return a share as percent: 42%, 0.5%."""
    return f"{100 * value:.4g}%"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    label: str
    """Of the vertical axis, with the unit."""
    curves: tuple[Curve, ...]
    text: Callable[[float], str] = tick_text
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    height: float = 1.35
    """Inches."""

    def curves_with_data(self, runs: Sequence[RunLog]) -> list[Curve]:
        """Return the curves that at least one run has a number for."""
        return [curve for curve in self.curves if any(curve.series(run) for run in runs)]


PANELS = (
    Panel(
        "loss",
        "loss",
        (
            Curve("loss", "training loss", smoothed=True),
            Curve("eval_loss", "evaluation loss", style="points"),
        ),
        height=3.0,
    ),
    Panel("tok_per_sec", "tokens/s", (Curve("tok_per_sec", "tokens/s"),), from_zero=True),
    Panel(
        "mfu",
        "MFU",
        (Curve("mfu", "MFU"), Curve("hfu", "HFU", style="dashed", beside="mfu")),
        text=percent_text,
        from_zero=True,
    ),
    Panel(
        "memory",
        "memory (GiB)",
        (Curve("peak_mem_allocated", "memory", scale=2.0**-30, band=True),),
        from_zero=True,
    ),
    Panel("learning_rate", "learning rate", (Curve("learning_rate", "learning rate"),), from_zero=True),
)
_BY_NAME = {panel.name: panel for panel in PANELS}
_STYLES: tuple[CurveStyle, ...] = ("line", "dashed", "dotted")


def choose_panels(names: Sequence[str] | None, runs: Sequence[RunLog]) -> list[Panel]:
    """Return the named panels, or by default those of `PANELS` that some run has figures for.

    Args:
        names: Names of panels, keys of the log entries, or several keys joined by "+".
        runs: The runs to draw.

    Raises:
        ValueError: A name is neither a panel nor a key of these logs; a panel has nothing to draw.
    """
    if names is None:
        chosen = [panel for panel in PANELS if panel.curves_with_data(runs)]
        if not chosen:
            every = ", ".join(curve.key for panel in PANELS for curve in panel.curves)
            raise ValueError(f"nothing to plot: no entry of {_paths(runs)} has a number under {every}")
        return chosen
    if isinstance(names, str) or not names:
        raise ValueError(
            f"panels={names!r}: must be a list with the names of panels, such as ['loss', 'mfu']"
        )
    return [_panel(name, runs) for name in dict.fromkeys(names)]


def _panel(name: str, runs: Sequence[RunLog]) -> Panel:
    panel = _BY_NAME.get(name) or _panel_of_keys(name, runs)
    if not panel.curves_with_data(runs):
        keys = " or ".join(curve.key for curve in panel.curves)
        raise ValueError(
            f"nothing to plot in panel {name!r}: no entry of {_paths(runs)} has a number under {keys}"
        )
    return panel


def _panel_of_keys(name: str, runs: Sequence[RunLog]) -> Panel:
    logged = {key for run in runs for entry in run.entries for key in entry}
    keys = name.split("+")
    for key in keys:
        if key not in logged:
            close = difflib.get_close_matches(key, sorted({*logged, *_BY_NAME}), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"panels: {key!r} is neither a panel nor a key of these logs; {hint}"
                f"the panels are {', '.join(_BY_NAME)}"
            )
    lines = [key for key in keys if not key.startswith("eval_")]
    curves = [
        Curve(key, key, style=_STYLES[lines.index(key) % len(_STYLES)] if key in lines else "points")
        for key in dict.fromkeys(keys)
    ]
    return Panel(name, "\n".join(key.replace("_", " ") for key in keys), tuple(curves))


def _paths(runs: Sequence[RunLog]) -> str:
    return ", ".join(str(run.path) for run in runs) or "no file"


def smooth_values(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average, corrected for its start; nan stays nan and leaves no trace.

    s_t = weight * s_(t-1) + (1 - weight) * v_t from s_0 = 0, divided by 1 - weight^t, as in Adam
    (Kingma and Ba, 2015, section 3).

    Args:
        values: One value for each log entry.
        weight: Share of the past, from 0 (no smoothing) to below 1.
    """
    average, norm = 0.0, 0.0
    smoothed = []
    for value in values:
        if not math.isfinite(value):
            smoothed.append(math.nan)
            continue
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smoothed.append(average / norm)
    return smoothed
