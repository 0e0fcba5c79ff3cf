"""The picture of a run that went from trainer to trainer."""

from __future__ import annotations

from pathlib import Path

from .chain import Chain
from .curve import EXACT

_COLOURS = {"single": "tab:blue", "ddp": "tab:orange", "fsdp2": "tab:green", "pipeline": "tab:red"}


def plot(chain: Chain, path: Path) -> None:
    """Draw the loss, coloured by trainer, over the undisturbed run, and how far the one is from the other."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (loss, off) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 5.4), height_ratios=(3, 1), layout="constrained"
    )
    told = chain.undisturbed
    loss.plot(list(told), list(told.values()), color="0.75", linewidth=5, label="one process, undisturbed")
    for leg in chain.legs:
        colour = _COLOURS[leg.trainer.split()[0]]
        # From the last step of the leg before, so that the line has no gaps.
        steps = [step for step in range(leg.first - 1, leg.last + 1) if step in chain.losses]
        label = f"{leg.trainer}: steps {leg.first} to {leg.last}"
        loss.plot(steps, [chain.losses[step] for step in steps], color=colour, linewidth=1.3, label=label)
        own = [step for step in steps if step >= leg.first]
        # What does not deviate at all has no place on a logarithmic axis.
        seen = [step for step in own if chain.deviations[step] > 0]
        off.plot(seen, [chain.deviations[step] for step in seen], ".", color=colour, markersize=3)
        for axes in (loss, off):
            axes.axvline(leg.first - 0.5, color="0.6", linewidth=0.6, linestyle=":")
    off.axhline(EXACT, color="black", linewidth=0.8, linestyle="--")
    off.annotate("bound", (1, EXACT), xytext=(0, -9), textcoords="offset points", fontsize=8)
    loss.set(
        ylabel="loss, nats per byte",
        title="One run by four trainers, each going on from the checkpoint of the one before",
    )
    off.set(yscale="log", xlabel="optimizer step", ylabel="relative deviation")
    loss.legend(fontsize=8)
    for axes in (loss, off):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
