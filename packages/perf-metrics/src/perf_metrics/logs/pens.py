"""Colours and line styles, the same in the panels and in the legend."""

from __future__ import annotations

from dataclasses import dataclass

from .panels import CurveStyle
from .run_log import RunLog

# Okabe and Ito's colours, told apart with any colour vision; the yellow is left out, too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#5f6368"
PALE = 0.3
"""Opacity of values as logged behind smoothed ones."""
BAND = 0.2
"""Opacity of the range over the ranks."""
LINE_STYLES: dict[CurveStyle, str | tuple[float, tuple[float, ...]]] = {
    "line": "-",
    "dashed": (0, (4, 2)),
    "dotted": (0, (1, 1.5)),
    "points": (0, (4, 2)),
}


@dataclass(frozen=True)
class DrawnRun:
    """A run with its name in the legend."""

    name: str
    log: RunLog


@dataclass(frozen=True)
class Pen:
    """The colour of a run's lines, and that of its points."""

    colour: str
    points_colour: str


def pens_for(count: int) -> list[Pen]:
    """Return a pen for each of so many runs."""
    if count == 1:
        return [Pen(_COLOURS[0], _COLOURS[1])]
    if count <= len(_COLOURS):
        return [Pen(colour, colour) for colour in _COLOURS[:count]]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = [to_hex(colormaps["turbo"](0.05 + 0.9 * index / (count - 1))) for index in range(count)]
    return [Pen(shade, shade) for shade in shades]


def literal(text: str) -> str:
    """Keep matplotlib from reading dollar signs as formulas."""
    return text.replace("$", r"\$")
