"""The one legend of the picture: which colour is which run, and what dashes, points and bands mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .panels import Curve, Panel
from .pens import BAND, GREY, LINE_STYLES, PALE, DrawnRun, Pen, literal
from .run_log import RunLog

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

    Entry: TypeAlias = tuple[Artist, str]

_CHARACTERS = 105
"""About as many fit side by side."""
_HANDLE_CHARACTERS = 9
"""Width of the line before a text and the room behind it, in characters."""


def add_legend(
    figure: Figure,
    runs: Sequence[DrawnRun],
    panels: Sequence[Panel],
    pens: Sequence[Pen],
    *,
    title: str,
    smooth: float,
) -> int:
    """Put the title and the legend above the panels, and return the number of rows of the legend."""
    entries = _entries(runs, panels, pens, smooth)
    if not entries:
        figure.suptitle(literal(title), x=0.01, ha="left", fontsize=13, fontweight="bold")
        return 0
    columns = _columns_that_fit([len(text) for _, text in entries])
    # matplotlib fills column by column; this order makes it read row by row.
    by_column = [entry for column in range(columns) for entry in entries[column::columns]]
    figure.legend(
        [handle for handle, _ in by_column],
        [literal(text) for _, text in by_column],
        title=literal(title),
        title_fontproperties={"size": 13, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=columns,
        fontsize=10,
        frameon=False,
    )
    return -(-len(entries) // columns)


def _columns_that_fit(lengths: Sequence[int]) -> int:
    for columns in range(len(lengths), 1, -1):
        widest = [max(lengths[column::columns]) + _HANDLE_CHARACTERS for column in range(columns)]
        if sum(widest) <= _CHARACTERS:
            return columns
    return 1


def _entries(
    runs: Sequence[DrawnRun], panels: Sequence[Panel], pens: Sequence[Pen], smooth: float
) -> list[Entry]:
    from matplotlib.lines import Line2D

    entries: list[Entry] = []
    if len(runs) > 1:
        entries += [
            (Line2D([], [], color=pen.colour, lw=2.5), run.name) for pen, run in zip(pens, runs, strict=True)
        ]
    # With several runs the colour tells the run, and what a curve means is told in grey.
    pen = pens[0] if len(runs) == 1 else Pen(GREY, GREY)
    logs = [run.log for run in runs]
    for panel in panels:
        curves = panel.curves_with_data(logs)
        for curve in curves:
            # What the label of the axis says need not be said again.
            told = len(curves) == 1 or curve.meaning == panel.label
            entries += _explain(curve, logs, pen, told=told, smooth=smooth if curve.smoothed else 0.0)
    return entries


def _explain(curve: Curve, runs: Sequence[RunLog], pen: Pen, *, told: bool, smooth: float) -> list[Entry]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if curve.style == "points":
        style = LINE_STYLES["points"]
        colour = pen.points_colour
        points = Line2D([], [], color=colour, marker="o", ls=style, lw=0.8, ms=5.5, mec="white")
        return [(points, curve.meaning)]
    found: list[Entry] = []
    line = Line2D([], [], color=pen.colour, ls=LINE_STYLES[curve.style], lw=1.5)
    if smooth:
        found.append((line, f"{curve.meaning}, smoothed ({smooth:g})"))
        pale = Line2D([], [], color=pen.colour, lw=1.5, alpha=PALE)
        found.append((pale, f"{curve.meaning} as logged"))
    elif not told:
        found.append((line, curve.meaning))
    if curve.band and any(_has_ranks(run, curve.key) for run in runs):
        found.append((Patch(color=pen.colour, alpha=BAND, lw=0), f"{curve.meaning}, all ranks"))
    return found


def _has_ranks(run: RunLog, key: str) -> bool:
    return any(isinstance(value := entry.get(key), list) and len(value) > 1 for entry in run.entries)
