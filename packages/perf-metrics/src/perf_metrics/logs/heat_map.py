"""The map of what each expert of each layer was sent in the course of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .log_file import is_final
from .summary import RunLog, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Loads = Mapping[str, list[float]]
"""By layer, what each of its experts was sent over the mean of the layer."""
_BRIGHTEST = 2.0
"""Loads from here on have one colour: twice the mean."""


def loads_of(run: RunLog, key: str) -> dict[float, Loads]:
    """The tables that the entries of a run have under a key, by step; those of other shapes are left out."""
    found: dict[float, Loads] = {}
    shape: list[tuple[str, int]] | None = None
    for entry in run.entries:
        table = entry.get(key)
        if is_final(entry) or not isinstance(table, dict) or not table:
            continue
        loads = {
            str(layer): numbers for layer, row in table.items() if (numbers := _numbers(row)) is not None
        }
        found_shape = [(layer, len(row)) for layer, row in loads.items()]
        shape = shape or found_shape
        if len(loads) == len(table) and found_shape == shape:
            found[step_of(entry)] = loads
    return dict(sorted(found.items()))


def _numbers(row: object) -> list[float] | None:
    if not isinstance(row, list) or not row:
        return None
    numbers = [each for each in row if isinstance(each, int | float) and not isinstance(each, bool)]
    return [float(each) for each in numbers] if len(numbers) == len(row) else None


def draw_loads(axes: Axes, run: RunLog, key: str, place: Callable[[float], float], label: str) -> None:
    """Draw the map: steps from left to right, the experts of one layer above those of the next.

    Args:
        axes: Where to.
        run: The log.
        key: Of the tables.
        place: Where a step is on the horizontal axis.
        label: Of the vertical axis.
    """
    tables = loads_of(run, key)
    places = [place(step) for step in tables]
    columns = [[load for row in table.values() for load in row] for table in tables.values()]
    known = [(x, column) for x, column in zip(places, columns, strict=True) if math.isfinite(x)]
    places, columns = [x for x, _ in known], [column for _, column in known]
    first = next(iter(tables.values()))
    image = axes.pcolormesh(
        _edges(places),
        range(len(columns[0]) + 1),
        list(zip(*columns, strict=True)),
        cmap="RdBu_r",
        vmin=0.0,
        vmax=_BRIGHTEST,
        rasterized=True,
    )
    axes.invert_yaxis()
    ends: list[int] = []
    middles: list[float] = []
    for row in first.values():
        start = ends[-1] if ends else 0
        ends.append(start + len(row))
        middles.append((start + ends[-1]) / 2)
    for end in ends[:-1]:
        axes.axhline(end, color="black", lw=0.8)
    # As many names as can be read.
    every = -(-len(first) // 12)
    axes.set_yticks(middles[::every], [_short(name) for name in first][::every])
    axes.set_ylabel(label)
    bar = axes.figure.colorbar(image, ax=axes, ticks=[0, 1, 2], pad=0.01, fraction=0.03)
    bar.ax.set_yticklabels(["0", "even", "2x"])


def _edges(places: list[float]) -> list[float]:
    """Borders between columns: an entry is about the steps since the one before."""
    before = places[0] - (places[1] - places[0] if len(places) > 1 else 1.0)
    return [max(0.0, before), *places]


def _short(name: str) -> str:
    """The number of the layer in the name of a router, or the name."""
    return next((part for part in name.split(".") if part.isdecimal()), name)
