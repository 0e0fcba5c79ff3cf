"""The breakdown of steps as a picture; matplotlib is imported when it is made."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .classify import LABELS, Category
from .losses import largest_loss
from .ranks import RankBreakdown, TraceBreakdown

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLORS: dict[Category, str] = {
    "matmul": "#1b7837",
    "attention": "#5aae61",
    "other_kernels": "#a6dba0",
    "exposed_communication": "#d6604d",
    "memory_copies": "#f4a582",
    "checkpoint": "#9970ab",
    "data_wait": "#2166ac",
    "host_gap": "#bababa",
}
_WAITING_COLOR = "#8c1d18"
_OVERLAPPED = "overlapped communication"
_LIGHT_TEXT_ON = {_WAITING_COLOR, *(_COLORS[name] for name in ("matmul", "data_wait", "checkpoint"))}
_TALL_ROWS = 32
"""Ranks up to which each has a row with numbers in it; those of more are as thin as they must be."""
_LEAST_NUMBER = 0.05


def plot_breakdown(breakdown: TraceBreakdown, output: str | Path) -> Path:
    """Draw a stacked bar for each rank, with overlapped communication as a thin bar below it.

    Args:
        breakdown: What `read_breakdown` gave.
        output: The picture; its suffix, .png or .svg, decides the kind.

    Returns:
        The path of the picture.

    Raises:
        ValueError: The suffix is another one.
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
    """
    # Here, because what reads traces on a monitoring host needs nothing of the curves.
    from ..logs.plot import check_suffix, new_figure, save_figure

    output = Path(output)
    check_suffix(output)
    ranks = breakdown.ranks
    figure = new_figure("plot_breakdown")
    row = 0.42 if len(ranks) <= _TALL_ROWS else 14 / len(ranks)
    figure.set_size_inches(9.0, 1.9 + row * len(ranks))
    axes = figure.add_subplot()
    shown = _draw_bars(axes, ranks)
    _finish_axes(axes, ranks)
    axes.set_title("\n".join(textwrap.wrap(largest_loss(breakdown), 125)), loc="left", fontsize=9)
    order = [*(label for label, _, _ in _segments(ranks[0], alone=len(ranks) == 1)), _OVERLAPPED]
    labels = [label for label in order if label in shown]
    figure.legend(
        [shown[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    save_figure(figure, output)
    return output


def _draw_bars(axes: Axes, ranks: Sequence[RankBreakdown]) -> dict[str, Artist]:
    """Draw, and return one bar of each label for the legend."""
    shown: dict[str, Artist] = {}
    for place, one in enumerate(ranks):
        left = 0.0
        for label, share, color in _segments(one, alone=len(ranks) == 1):
            if share <= 0:
                continue
            (bar,) = axes.barh(place, share, left=left, height=0.62, color=color, linewidth=0)
            shown.setdefault(label, bar)
            if share >= _LEAST_NUMBER and len(ranks) <= _TALL_ROWS:
                ink = "white" if color in _LIGHT_TEXT_ON else "black"
                middle = left + share / 2
                axes.text(middle, place, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
            left += share
        if one.overlapped_ns:
            (bar,) = axes.barh(
                place + 0.39,
                one.share(one.overlapped_ns),
                height=0.12,
                color="white",
                edgecolor=_COLORS["exposed_communication"],
                hatch="//////",
                linewidth=0.6,
            )
            shown.setdefault(_OVERLAPPED, bar)
    return shown


def _finish_axes(axes: Axes, ranks: Sequence[RankBreakdown]) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of a step")
    # As many names as can be read.
    every = -(-len(ranks) // _TALL_ROWS)
    axes.set_yticks(range(0, len(ranks), every), [f"rank {one.rank}" for one in ranks[::every]])
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _segments(one: RankBreakdown, *, alone: bool) -> list[tuple[str, float, str]]:
    """Label, share and color, from left to right."""
    waiting = one.share(sum(one.waiting_ns.values()))
    found = []
    for name, share in one.shares.items():
        if name == "exposed_communication" and not alone:
            found.append(("waiting for other ranks", waiting, _WAITING_COLOR))
            found.append(("exposed transfer", share - waiting, _COLORS[name]))
        else:
            found.append((LABELS[name], share, _COLORS[name]))
    return found
