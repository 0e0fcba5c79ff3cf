"""How counts grow with the number of ranks: the simplest law that fits, and what it says of larger jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

TERMS = {
    "log N": np.log2,
    "linear": lambda n: n,
    "N log N": lambda n: n * np.log2(n),
    "quadratic": lambda n: n**2,
    "cubic": lambda n: n**3,
}
"""From the slowest growth to the fastest. N log N: the number of a rank is longer in a larger job."""
_SHOWN = {"log N": "log2 N", "linear": "N", "N log N": "N log2 N", "quadratic": "N^2", "cubic": "N^3"}
_GOOD_ERROR = 0.03
"""The fewest terms with no larger relative error at any of the sizes are taken."""
_SMALLEST = 8
"""Fewer ranks than that say little: a tree of 16 is flat there."""


@dataclass(frozen=True)
class Fit:
    """A law of growth: a sum of terms.

    Attributes:
        base: What does not grow.
        factors: What stands before each of `TERMS` that is there; none is negative.
        error: Largest relative error at the sizes fitted.
    """

    base: float
    factors: Mapping[str, float]
    error: float

    @property
    def law(self) -> str:
        """The fastest term."""
        return next((name for name in reversed(TERMS) if name in self.factors), "constant")

    def at(self, size: int) -> float:
        """What the law says of a number of ranks."""
        number = np.array(float(size))
        return self.base + sum(factor * float(TERMS[name](number)) for name, factor in self.factors.items())

    def __str__(self) -> str:
        terms = [f"{factor:.3g} {_SHOWN[name]}" for name, factor in self.factors.items()]
        return " + ".join([*([f"{self.base:.3g}"] if self.base or not terms else []), *terms]).replace(
            "+ -", "- "
        )


def fit(counts: Mapping[int, float]) -> Fit:
    """The law with the fewest and slowest terms that fits, or the one that fits best.

    Args:
        counts: Messages or bytes, by the number of ranks.
    """
    sizes = np.array([float(size) for size in sorted(counts) if size >= _SMALLEST])
    values = np.array([float(counts[int(size)]) for size in sizes])
    if not values.any():
        return Fit(0.0, {}, 0.0)
    found: list[Fit] = []
    for number in range(min(4, len(sizes))):
        for names in combinations(TERMS, number):
            columns = np.stack([np.ones_like(sizes), *(TERMS[name](sizes) for name in names)], axis=1)
            # Relative errors: the largest job is not all that counts.
            solved, *_ = np.linalg.lstsq(columns / values[:, None], np.ones_like(values), rcond=None)
            if any(factor < 0 for factor in solved[1:]):
                continue
            error = float(np.max(np.abs(columns @ solved / values - 1)))
            law = Fit(float(solved[0]), dict(zip(names, map(float, solved[1:]), strict=True)), error)
            if error <= _GOOD_ERROR:
                return law
            found.append(law)
    return min(found, key=lambda each: each.error)


def plot(
    path: Path, results: Mapping[str, Any], before: Mapping[str, Any] | None, phases: Sequence[str]
) -> None:
    """Draw messages and bytes over the number of ranks, of a rank and of rank 0, with the fits beyond."""
    import matplotlib.pyplot as plt

    panels = [
        ("bytes_per_rank", "bytes per rank"),
        ("bytes_rank_0", "bytes that rank 0 handles"),
        ("rounds", "messages one after another"),
        ("messages_rank_0", "messages that rank 0 handles"),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(13, 9))
    for panel, (key, title) in zip(axes.flat, panels, strict=True):
        for number, phase in enumerate(phases):
            colour = f"C{number}"
            for told, style, label in ((before, ":", None), (results, "-", results["names"][phase])):
                if told is None:
                    continue
                entry = told["phases"][phase][key]
                counts = {int(size): value for size, value in entry["counts"].items()}
                line = [max(value, 0.8) for value in counts.values()]
                panel.plot(list(counts), line, "o" if style == "-" else "x", color=colour, markersize=4)
                law = Fit(**entry["fit"])
                beyond = [2**power for power in range(3, 15)]
                panel.plot(
                    beyond,
                    [max(law.at(size), 0.8) for size in beyond],
                    style,
                    color=colour,
                    label=label,
                    linewidth=1,
                )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(title)
        panel.set_xlabel("ranks")
        panel.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(
        "points: counted; lines: the fit, to 16,384 ranks" + ("; dotted: before" if before else "")
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def human(number: float) -> str:
    """A count in few digits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if math.isfinite(number) else "-"
