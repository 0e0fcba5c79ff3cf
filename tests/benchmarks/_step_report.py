"""What the step benchmark tells: a summary of its samples, a table for each size, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _step_contenders import CONTENDERS, PLAIN, PLAIN_FUSED, Contender, Sample

Samples = Mapping[str, Sequence[Sample]]
"""By label, one sample of each round."""
QUIET = 10
"""Percentile of the quiet windows."""


def summarise(samples: Samples) -> dict[str, Any]:
    """The figures of one size, by label.

    A paired difference is that of the medians of two contenders in the same round. A quiet figure compares
    the 10th percentiles of all windows: what both cost when nothing else ran.
    """
    return {
        contender.label: {
            "optimizer": contender.optimizer,
            "data": contender.data,
            "logs": contender.logs,
            "cpu_ms": _spread(_all(samples[contender.label], "cpu")),
            "wall_ms": _spread(_all(samples[contender.label], "wall")),
            "over_plain": _compare(samples[contender.label], samples[PLAIN.label]),
            "over_plain_same_optimizer": _compare(
                samples[contender.label], samples[_same_optimizer(contender).label]
            ),
            "setup_cpu_ms": _spread([sample.setup.cpu for sample in samples[contender.label]]),
            "setup_wall_ms": _spread([sample.setup.wall for sample in samples[contender.label]]),
        }
        for contender in CONTENDERS
    }


def rows(summary: Mapping[str, Any], size: str) -> list[list[str]]:
    """The table of one size."""
    table = [
        [
            f"{size}, CPU ms per step",
            "AdamW",
            "batches",
            "quiet",
            "over plain, quiet",
            "over plain, median (10 % to 90 %)",
            "same AdamW, quiet",
            "wall ratio, quiet (median)",
            "set-up ms",
        ]
    ]
    for label, told in summary.items():
        over, same, setup = told["over_plain"], told["over_plain_same_optimizer"], told["setup_wall_ms"]
        paired = over["cpu_ms_paired"]
        table.append(
            [
                label,
                told["optimizer"],
                told["data"],
                f"{told['cpu_ms']['quiet']:.3f}",
                f"{over['cpu_ms_quiet']:+.3f}",
                f"{paired['median']:+.3f} ({paired['quiet']:+.3f} to {paired['high']:+.3f})",
                f"{same['cpu_ms_quiet']:+.3f}",
                f"{over['wall_ratio_quiet']:.3f} ({over['wall_ratio_paired']['median']:.3f})",
                f"{setup['median']:.1f}",
            ]
        )
    return table


def plot(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the milliseconds over the plain loop: bars for quiet windows, lines for 10 % to 90 % of rounds."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6.5 * len(results), 4.2), squeeze=False)
    ours = {contender.label: contender.ours for contender in CONTENDERS}
    for number, (axes, (size, result)) in enumerate(zip(panels[0], results.items(), strict=True)):
        told = {label: figures["over_plain"] for label, figures in result["contenders"].items()}
        labels = [label for label in reversed(told) if label != PLAIN.label]
        colours = ["tab:orange" if ours[label] else "tab:blue" for label in labels]
        quiet = [told[label]["cpu_ms_quiet"] for label in labels]
        axes.barh(labels, quiet, color=colours)
        for place, label in enumerate(labels):
            paired = told[label]["cpu_ms_paired"]
            axes.plot([paired["quiet"], paired["high"]], [place, place], color="black", linewidth=1)
        axes.axvline(0, color="black", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"{size}: a plain step takes {_plain_ms(result):.2f} ms")
        axes.set_xlabel("CPU ms per step over a plain loop")
        if number:
            axes.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def _plain_ms(result: Mapping[str, Any]) -> float:
    figure: float = result["contenders"][PLAIN.label]["cpu_ms"]["quiet"]
    return figure


def _compare(told: Sequence[Sample], beside: Sequence[Sample]) -> dict[str, Any]:
    cpu, wall = _pairs(told, beside, "cpu"), _pairs(told, beside, "wall")
    quiet = {clock: [_percentile(_all(part, clock), QUIET) for part in (told, beside)] for clock in _CLOCKS}
    return {
        "cpu_ms_quiet": quiet["cpu"][0] - quiet["cpu"][1],
        "cpu_ms_paired": _spread([one - other for one, other in cpu]),
        "wall_ratio_quiet": quiet["wall"][0] / quiet["wall"][1],
        "wall_ratio_paired": _spread([one / other for one, other in wall]),
    }


_CLOCKS = ("cpu", "wall")


def _pairs(told: Sequence[Sample], beside: Sequence[Sample], clock: str) -> list[tuple[float, float]]:
    """The medians of the windows of both in each round."""
    return [
        (statistics.median(_all([one], clock)), statistics.median(_all([other], clock)))
        for one, other in zip(told, beside, strict=True)
    ]


def _all(samples: Sequence[Sample], clock: str) -> list[float]:
    return [getattr(window, clock) for sample in samples for window in sample.windows]


def _same_optimizer(contender: Contender) -> Contender:
    return PLAIN_FUSED if contender.optimizer == "fused" else PLAIN


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "quiet": _percentile(values, QUIET),
        "high": _percentile(values, 100 - QUIET),
    }


def _percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, interpolated between neighbours."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
