"""What the data-parallel benchmark tells: a table for each size, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def rows(summary: Mapping[str, Any], size: str) -> list[list[str]]:
    """The table of one size."""
    table = [
        [
            f"{size}, CPU ms per step and rank",
            "AdamW",
            "batches",
            "quiet",
            "over bare, quiet",
            "over bare, median (10 % to 90 %)",
            "same AdamW, quiet",
            "steps/s, quiet (median)",
            "set-up ms",
        ]
    ]
    for label, told in summary.items():
        over, same = told["over_bare"], told["over_bare_same_optimizer"]
        paired, wall = over["cpu_ms_paired"], told["wall_ms"]
        table.append(
            [
                label,
                told["optimizer"],
                told["data"],
                f"{told['cpu_ms']['quiet']:.3f}",
                f"{over['cpu_ms_quiet']:+.3f}",
                f"{paired['median']:+.3f} ({paired['quiet']:+.3f} to {paired['high']:+.3f})",
                f"{same['cpu_ms_quiet']:+.3f}",
                f"{1e3 / wall['quiet']:.4g} ({1e3 / wall['median']:.4g})",
                f"{told['setup_wall_ms']['median']:.1f}",
            ]
        )
    return table


def plot(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the milliseconds over bare DDP: bars for quiet windows, lines for 10 % to 90 % of rounds."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6.5 * len(results), 4.6), squeeze=False)
    for number, (axes, (size, result)) in enumerate(zip(panels[0], results.items(), strict=True)):
        bare, *others = result["contenders"].items()
        told = dict(reversed(others))
        colours = ["tab:orange" if figures["ours"] else "tab:blue" for figures in told.values()]
        quiet = [figures["over_bare"]["cpu_ms_quiet"] for figures in told.values()]
        axes.barh(list(told), quiet, color=colours)
        for place, figures in enumerate(told.values()):
            paired = figures["over_bare"]["cpu_ms_paired"]
            axes.plot([paired["quiet"], paired["high"]], [place, place], color="black", linewidth=1)
        axes.axvline(0, color="black", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"{size}: a bare step takes {bare[1]['cpu_ms']['quiet']:.2f} ms")
        axes.set_xlabel("CPU ms per step and rank over bare DDP")
        if number:
            axes.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
