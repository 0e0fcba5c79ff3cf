"""Curves of one or several runs as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .log_file import LOG_FILENAME, JsonValue, LogEntry, load_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LogPath: TypeAlias = str | Path

_SUFFIXES = (".png", ".svg")
# Okabe and Ito's colours, told apart with any colour vision; the yellow is left out, too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_GREY = "#5f6368"
_LOWER_KEY = "learning_rate"


@dataclass(frozen=True)
class _Run:
    label: str
    colour: str
    entries: list[LogEntry]


def plot_logs(
    log_paths: LogPath | Sequence[LogPath],
    output: LogPath,
    *,
    keys: Sequence[str] = ("loss", "eval_loss"),
    labels: Sequence[str] | None = None,
    title: str | None = None,
    learning_rate: bool = True,
) -> Path:
    """Draw figures of log files against the step, several runs over one another.

    Keys that begin with "eval_" are drawn as points, others as lines; a list is drawn by its largest element;
    null leaves a gap. The learning rate, where logged, has a panel of its own below. The picture replaces
    `output` in one step.

    Args:
        log_paths: One log file or several; a directory stands for the `trainer_logs.json` in it.
        output: The picture; its suffix, .png or .svg, decides the kind.
        keys: Keys of the log entries to draw, on one axis.
        labels: A name for each run; by default taken from the paths.
        title: By default "Training curve", with the run's name when there is one run.
        learning_rate: Whether to draw the panel of the learning rate.

    Returns:
        The path of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
        FileNotFoundError: A log file does not exist.
        ValueError: The suffix is another one, a file is not a log, the labels do not match the paths, or no
            entry has any of the keys.
    """
    output = Path(output)
    if output.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"output={str(output)!r}: the suffix must be {' or '.join(_SUFFIXES)}")
    paths = [Path(p) for p in ([log_paths] if isinstance(log_paths, str | Path) else log_paths)]
    runs = _load_runs(paths, labels)
    drawn = [key for key in keys if any(_points(run.entries, key)[0] for run in runs)]
    if not drawn:
        wanted, names = ", ".join(keys), ", ".join(str(path) for path in paths)
        raise ValueError(f"nothing to plot: no entry of {names or 'no file'} has a number under {wanted}")
    lower = learning_rate and any(_points(run.entries, _LOWER_KEY)[0] for run in runs)
    figure = _draw(runs, drawn, title or _default_title(runs), lower)
    _save(figure, output)
    return output


def _load_runs(paths: Sequence[Path], labels: Sequence[str] | None) -> list[_Run]:
    names = list(labels) if labels is not None else _default_labels(paths)
    if len(names) != len(paths):
        raise ValueError(f"labels has {len(names)} names for {len(paths)} log files; give one for each")
    return [
        _Run(name, _COLOURS[index % len(_COLOURS)], load_logs(path))
        for index, (path, name) in enumerate(zip(paths, names, strict=True))
    ]


def _default_labels(paths: Sequence[Path]) -> list[str]:
    names = [path.parent.resolve().name if path.name == LOG_FILENAME else path.stem for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def _default_title(runs: Sequence[_Run]) -> str:
    return f"Training curve: {runs[0].label}" if len(runs) == 1 else "Training curves"


def _points(entries: Sequence[LogEntry], key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the entries that have the key; nan where the value is null."""
    points = [
        (step, _as_number(entry[key]))
        for entry in entries
        if key in entry and isinstance(step := entry.get("global_step"), int | float)
    ]
    if all(math.isnan(value) for _, value in points):
        return [], []
    return [step for step, _ in points], [value for _, value in points]


def _as_number(value: JsonValue) -> float:
    if isinstance(value, list):
        return max((_as_number(element) for element in value), default=math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def _draw(runs: Sequence[_Run], keys: Sequence[str], title: str, lower: bool) -> Figure:
    # The object interface leaves the user's pyplot state, backend and rcParams alone.
    figure = _new_figure(height=6.0 if lower else 4.5)
    if lower:
        upper, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.5, 1])
        _draw_keys(below, runs, [_LOWER_KEY])
        below.set_ylabel("learning rate")
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        axes = [upper, below]
    else:
        axes = [figure.subplots()]
    _draw_keys(axes[0], runs, keys)
    axes[0].set_ylabel(_axis_label(keys))
    axes[0].set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    if len(runs) * len(keys) > 1:
        axes[0].legend(fontsize=10, facecolor="white", edgecolor="none", framealpha=0.9)
    axes[-1].set_xlabel("step")
    figure.align_ylabels(axes)
    for panel in axes:
        _tidy(panel)
    return figure


def _draw_keys(axes: Axes, runs: Sequence[_Run], keys: Sequence[str]) -> None:
    for run in runs:
        for key in keys:
            steps, values = _points(run.entries, key)
            if not steps:
                continue
            label = key if len(runs) == 1 else run.label if len(keys) == 1 else f"{run.label}: {key}"
            colour = run.colour
            if key.startswith("eval_"):
                if len(runs) == 1:
                    colour = _COLOURS[1]
                axes.plot(
                    steps, values, "o--", color=colour, lw=0.8, ms=5.5, mec="white", label=label, zorder=3
                )
            else:
                marker = "o" if len(steps) == 1 else ""
                axes.plot(steps, values, color=colour, lw=1.5, marker=marker, label=label)


def _axis_label(keys: Sequence[str]) -> str:
    names = dict.fromkeys(key.removeprefix("eval_").replace("_", " ") for key in keys)
    return ", ".join(names)


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#e3e5e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_GREY, labelsize=10)
    axes.margins(x=0.02)


def _new_figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot_logs needs matplotlib, which is not installed: pip install 'perf-metrics[plot]'",
            name=error.name,
        ) from error
    return Figure(figsize=(8.5, height), dpi=150, layout="constrained")


def _save(figure: Figure, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    figure.savefig(temporary, facecolor="white")
    temporary.replace(output)
