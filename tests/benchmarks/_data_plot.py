"""The picture of the data benchmark: resuming at growing positions, and dispatch beside the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(path: Path, results: dict[str, Any]) -> None:
    """Draw what was measured of resuming: milliseconds to the first batch over the position."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, by_workers in results["resume"]["milliseconds"].items():
        told = by_workers["0"]
        positions = [int(position) for position in told]
        ours = not name.startswith("StatefulDataLoader")
        axes.plot(
            positions,
            [told[position]["median"] for position in told],
            marker="o",
            linewidth=2.5 if ours else 1.2,
            linestyle="-" if ours else "--",
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="batches before the stop", ylabel="ms to the first batch")
    axes.set_title("Going on after a stop, no worker processes")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
