"""Plots the curves of one or several runs; matplotlib is imported when a figure is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .heat_map import draw_loads, loads_of
from .summary import TOKEN_KEYS, RunLog, Series, default_names, read_run

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Entry: TypeAlias = tuple[Artist, str]

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
    loads: str | None = None
    """A key whose tables are drawn as a map in the place of curves, of one run alone."""

    def has_data(self, runs: Sequence[RunLog]) -> bool:
        """Whether there is something to draw."""
        if self.loads is None:
            return bool(self.curves_with_data(runs))
        return len(runs) == 1 and bool(loads_of(runs[0], self.loads))

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
    Panel("experts", "experts by layer", (), height=2.6, loads="expert_load"),
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
        chosen = [panel for panel in PANELS if panel.has_data(runs)]
        if not chosen:
            every = ", ".join(curve.key for panel in PANELS for curve in panel.curves)
            raise ValueError(f"nothing to plot: no entry of {_paths(runs)} has a number under {every}.")
        return chosen
    if isinstance(names, str) or not names:
        raise ValueError(
            f"panels={names!r} must be a list with the names of panels, such as ['loss', 'mfu']."
        )
    return [_panel(name, runs) for name in dict.fromkeys(names)]


def _panel(name: str, runs: Sequence[RunLog]) -> Panel:
    panel = _BY_NAME.get(name) or _panel_of_keys(name, runs)
    if panel.loads is not None and len(runs) > 1:
        raise ValueError(
            f"panel {name!r} is a map of one run, but there are {len(runs)}. Draw them one by one."
        )
    if not panel.has_data(runs):
        keys = panel.loads or " or ".join(curve.key for curve in panel.curves)
        raise ValueError(
            f"nothing to plot in panel {name!r}: no entry of {_paths(runs)} has a number under {keys}."
        )
    return panel


def _panel_of_keys(name: str, runs: Sequence[RunLog]) -> Panel:
    logged = {key for run in runs for entry in run.entries for key in entry}
    keys = name.split("+")
    for key in keys:
        if key not in logged:
            close = difflib.get_close_matches(key, sorted({*logged, *_BY_NAME}), n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"panels has {key!r}, which is neither a panel nor a key of these logs. {hint}The panels "
                f"are {', '.join(_BY_NAME)}."
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
}
POINTS: dict[str, Any] = {"marker": "o", "ls": (0, (4, 2)), "lw": 0.8, "ms": 5.5, "mec": "white"}


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
        return [(Line2D([], [], color=pen.points_colour, **POINTS), curve.meaning)]
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


XAxis = Literal["step", "tokens"]
_WIDTH = 8.5


def draw(runs: Sequence[DrawnRun], panels: Sequence[Panel], *, title: str, x: XAxis, smooth: float) -> Figure:
    """Return a figure with the panels below one another, all runs in each.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure("plot_logs")
    pens = pens_for(len(runs))
    columns = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[panel.height for panel in panels]
    )
    axes: list[Axes] = list(columns[:, 0])
    for panel, place in zip(panels, axes, strict=True):
        for run, pen in zip(runs, pens, strict=True):
            for curve in panel.curves:
                _draw_curve(place, run.log, curve, pen, x=x, smooth=smooth if curve.smoothed else 0.0)
        if panel.loads is None:
            _finish(place, panel)
        else:
            draw_loads(
                place, runs[0].log, panel.loads, lambda step: _place(runs[0].log, step, x), panel.label
            )
    _finish_bottom(axes[-1], x)
    figure.align_ylabels(axes)
    legend_rows = add_legend(figure, runs, panels, pens, title=title, smooth=smooth)
    # Beside the panels: the title, the legend, and the labels of the horizontal axis.
    figure.set_size_inches(_WIDTH, 0.95 + 0.22 * legend_rows + sum(panel.height for panel in panels))
    return figure


def new_figure(caller: str) -> Figure:
    """An empty figure. `caller` is the function that needs matplotlib, if the message has to say so."""
    # The object interface leaves the user's pyplot state, backend and rcParams alone.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{caller} needs matplotlib, which is not installed. Install it with `pip install "
            "'perf-metrics[plot]'`.",
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
        axes.plot(places, values, color=pen.points_colour, zorder=3, **POINTS)
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
    axes: Axes, places: Sequence[float], values: Sequence[float], curve: Curve, pen: Pen, alpha: float = 1.0
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
    return [_place(run, step, x) for step in series.steps]


def _place(run: RunLog, step: float, x: XAxis) -> float:
    return step if x == "step" else run.tokens_at(step)


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


LogPath: TypeAlias = str | Path

_SUFFIXES = (".png", ".svg")


def plot_logs(
    log_paths: LogPath | Sequence[LogPath],
    output: LogPath,
    *,
    panels: Sequence[str] | None = None,
    x: XAxis = "step",
    smooth: float = 0.0,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw the figures of log files, several runs over one another, and replace `output` by the picture.

    | panel | draws |
    |---|---|
    | `loss` | `loss` as a line, `eval_loss` as points |
    | `tok_per_sec` | `tok_per_sec` |
    | `mfu` | `mfu` in percent, and `hfu` dashed where it differs |
    | `memory` | `peak_mem_allocated` in GiB: the highest rank as a line, the range over ranks as a band |
    | `learning_rate` | `learning_rate` |
    | `experts` | `expert_load` of one run: a map of the tokens of each expert over the mean of its layer |

    A null leaves a gap. In other panels a list, which has one element per rank, is drawn by its largest. A
    run that continued from a checkpoint may have done steps twice: the later entries count, and those from
    where training came back to are left out.

    Args:
        log_paths: One log or several; see `load_logs`.
        output: The picture; its suffix, .png or .svg, decides the kind.
        panels: Names from the table, from top to bottom. A name may also be a key of the log entries, such
            as "grad_norm", or several that share a panel: "grad_norm+grad_norm_max"; keys that begin with
            "eval_" are drawn as points. By default, the panels of the table that there are numbers for.
        x: What the horizontal axis counts: "step", or "tokens" by `total_tokens` (of Hugging Face's trainer:
            `num_input_tokens_seen`). An entry without a count stands on the line between its neighbours.
        smooth: Share of the past in an exponential moving average over the entries of `loss`, from 0 to below
            1. The values as logged are drawn pale behind it.
        labels: A name for each run; by default taken from the paths.
        title: By default "Training curve", with the run's name when there is one run.

    Returns:
        The path of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
        FileNotFoundError: A log file does not exist.
        ValueError: The suffix is another one, a file is not a log, the labels do not match the paths, a panel
            is unknown or has nothing to draw, a log has no tokens for the axis, or `smooth` is out of range.
    """
    output = Path(output)
    _check(output, x, smooth)
    paths = [Path(p) for p in ([log_paths] if isinstance(log_paths, str | Path) else log_paths)]
    runs = [DrawnRun(name, read_run(path)) for path, name in zip(paths, _names(paths, labels), strict=True)]
    logs = [run.log for run in runs]
    chosen = choose_panels(panels, logs)
    if x == "tokens":
        _check_tokens(logs)
    save_figure(draw(runs, chosen, title=title or _default_title(runs), x=x, smooth=smooth), output)
    return output


def check_suffix(output: Path) -> None:
    """Raise ValueError unless the picture is to be of a kind that is written here."""
    if output.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"output={str(output)!r} must end in {' or '.join(_SUFFIXES)}.")


def _check(output: Path, x: str, smooth: float) -> None:
    check_suffix(output)
    if x not in ("step", "tokens"):
        raise ValueError(f"x={x!r} must be 'step' or 'tokens'.")
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth={smooth!r} must be at least 0, for no smoothing, and below 1.")


def _names(paths: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    names = default_names(paths) if labels is None else list(labels)
    if len(names) != len(paths):
        raise ValueError(f"labels has {len(names)} names for {len(paths)} log files. Give one for each.")
    return names


def _check_tokens(runs: Sequence[RunLog]) -> None:
    for run in runs:
        if not run.has_tokens:
            keys = " or ".join(TOKEN_KEYS)
            raise ValueError(
                f"x='tokens' needs a number under {keys}, but no entry of {run.path} has one. Use x='step'."
            )


def _default_title(runs: Sequence[DrawnRun]) -> str:
    return f"Training curve: {runs[0].name}" if len(runs) == 1 else "Training curves"


def save_figure(figure: Figure, output: Path) -> None:
    """Write the picture whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    try:
        figure.savefig(temporary, facecolor="white")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
