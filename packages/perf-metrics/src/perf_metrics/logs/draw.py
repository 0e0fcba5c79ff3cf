"""Drawing panels with matplotlib, which is imported when a figure is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .legend import add_legend
from .panels import Curve, Panel, smooth_values, tick_text
from .pens import BAND, GREY, LINE_STYLES, PALE, DrawnRun, Pen, literal, pens_for
from .run_log import RunLog, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

XAxis = Literal["step", "tokens"]
_WIDTH = 8.5


def draw(runs: Sequence[DrawnRun], panels: Sequence[Panel], *, title: str, x: XAxis, smooth: float) -> Figure:
    """Return a figure with the panels below one another, all runs in each.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = _new_figure()
    pens = pens_for(len(runs))
    columns = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[panel.height for panel in panels]
    )
    axes: list[Axes] = list(columns[:, 0])
    for panel, place in zip(panels, axes, strict=True):
        for run, pen in zip(runs, pens, strict=True):
            for curve in panel.curves:
                _draw_curve(place, run.log, curve, pen, x=x, smooth=smooth if curve.smoothed else 0.0)
        _finish(place, panel)
    _finish_bottom(axes[-1], x)
    figure.align_ylabels(axes)
    legend_rows = add_legend(figure, runs, panels, pens, title=title, smooth=smooth)
    # Beside the panels: the title, the legend, and the labels of the horizontal axis.
    figure.set_size_inches(_WIDTH, 0.95 + 0.22 * legend_rows + sum(panel.height for panel in panels))
    return figure


def _new_figure() -> Figure:
    # The object interface leaves the user's pyplot state, backend and rcParams alone.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot_logs needs matplotlib, which is not installed: pip install 'perf-metrics[plot]'",
            name=error.name,
        ) from error
    return Figure(dpi=150, layout="constrained")


def _draw_curve(axes: Axes, run: RunLog, curve: Curve, pen: Pen, *, x: XAxis, smooth: float) -> None:
    series = curve.series(run)
    if not series:
        return
    places = _places(run, series, x)
    values = [value * curve.scale for value in series.values]
    if curve.style == "points":
        axes.plot(
            places,
            values,
            marker="o",
            linestyle=LINE_STYLES["points"],
            color=pen.points_colour,
            lw=0.8,
            ms=5.5,
            mec="white",
            zorder=3,
        )
        return
    if curve.band:
        lowest = [value * curve.scale for value in run.series(curve.key, min).values]
        if any(low < high for low, high in zip(lowest, values, strict=True)):
            axes.fill_between(places, lowest, values, color=pen.colour, alpha=BAND, lw=0)
    if smooth:
        _draw_line(axes, places, values, curve, pen, alpha=PALE)
        values = smooth_values(values, smooth)
    _draw_line(axes, places, values, curve, pen)


def _draw_line(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[float],
    curve: Curve,
    pen: Pen,
    alpha: float = 1.0,
) -> None:
    axes.plot(
        places,
        values,
        linestyle=LINE_STYLES[curve.style],
        color=pen.colour,
        lw=1.5,
        alpha=alpha,
        # A line needs two neighbours; a value that stands alone would not be seen.
        marker="o",
        ms=4,
        markevery=_alone(places, values),
    )


def _alone(places: Sequence[float], values: Sequence[float]) -> list[int]:
    shown = [math.isfinite(place + value) for place, value in zip(places, values, strict=True)]
    padded = [False, *shown, False]
    return [index for index in range(len(shown)) if padded[index : index + 3] == [False, True, False]]


def _places(run: RunLog, series: Series, x: XAxis) -> list[float]:
    return list(series.steps) if x == "step" else [run.tokens_at(step) for step in series.steps]


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_ylabel(literal(panel.label))
    axes.yaxis.set_major_formatter(lambda value, _: panel.text(value))
    axes.locator_params(axis="y", nbins=max(5, round(2 * panel.height)), steps=[1, 2, 2.5, 5, 10])
    if panel.from_zero and axes.dataLim.ymin >= 0 and axes.dataLim.ymax > 0:
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
    axes.grid(True, color="#e3e5e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=10)
    axes.margins(x=0.02)


def _finish_bottom(axes: Axes, x: XAxis) -> None:
    axes.set_xlabel(x)
    axes.locator_params(axis="x", nbins=9, integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if x == "step" else tick_text(value))
