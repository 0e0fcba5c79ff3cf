"""What the compile parity study tells: a table, and the curves on one another with their deviations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _parity_ways import PLAIN

Ways = Mapping[str, Mapping[str, Any]]
"""By label, what `train` returned."""
_LAST = 20
"""Steps over which the final loss is averaged."""


def summarise(ways: Ways) -> dict[str, dict[str, float]]:
    """The figures of each way, by label."""
    plain = ways[PLAIN.label]
    return {
        label: {
            "final_loss": statistics.fmean(told["loss"][-_LAST:]),
            "eval_loss": told["eval_loss"],
            "loss_deviation": max(deviations(told["loss"], plain["loss"])),
            "grad_norm_deviation": max(deviations(told["grad_norm"], plain["grad_norm"])),
            "hardware_over_model_flops": told["hardware_over_model_flops"],
            "cpu_ms": told["cpu_ms"],
            "tokens_per_cpu_second": told["tokens"] / told["cpu_ms"] * 1e3,
            "tokens_per_second": _quiet(told["tokens_per_second"]),
        }
        for label, told in ways.items()
    }


def rows(summary: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The table."""
    table = [
        [
            "",
            f"loss, last {_LAST} steps",
            "loss on help texts",
            "largest deviation of the loss",
            "of the gradient norm",
            "FLOPs done / needed",
            "CPU ms a step",
            "tokens per CPU second",
            "per second, quiet",
        ]
    ]
    for label, told in summary.items():
        table.append(
            [
                label,
                f"{told['final_loss']:.5f}",
                f"{told['eval_loss']:.4f}",
                f"{told['loss_deviation']:.1e}",
                f"{told['grad_norm_deviation']:.1e}",
                f"{told['hardware_over_model_flops']:.2f}",
                f"{told['cpu_ms']:.1f}",
                f"{told['tokens_per_cpu_second']:,.0f}",
                f"{told['tokens_per_second']:,.0f}",
            ]
        )
    return table


def deviations(values: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Relative, step by step."""
    return [abs(value / other - 1) for value, other in zip(values, plain, strict=True)]


def _quiet(values: Sequence[float]) -> float:
    """The 90th percentile of the second half, in which nothing is compiled any more."""
    ordered = sorted(values[len(values) // 2 :])
    return ordered[round(0.9 * (len(ordered) - 1))]


def plot(path: Path, ways: Ways) -> None:
    """Draw the losses on one another, wide lines below narrow ones, and under them how far they are apart."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    plain = ways[PLAIN.label]["loss"]
    steps = range(1, len(plain) + 1)
    colours = dict(zip(ways, ("black", "tab:gray", "tab:orange", "tab:blue", "tab:green"), strict=True))
    for place, (label, told) in enumerate(ways.items()):
        width = 2.0 * (len(ways) - place) - 1
        above.plot(steps, told["loss"], color=colours[label], linewidth=width, alpha=0.8, label=label)
        apart = deviations(told["loss"], plain)
        if any(apart):
            shown = [value or float("nan") for value in apart]
            size = 2.5 * (len(ways) - place) - 1
            below.plot(steps, shown, ".", markersize=size, color=colours[label], label=label)
    # Without deviation there is no place on a logarithmic axis.
    exact = [label for label, told in ways.items() if told["loss"] == plain and label != PLAIN.label]
    above.set_ylabel("loss, nats per byte")
    above.set_title("One run, trained in five ways")
    above.legend()
    above.grid(alpha=0.3)
    below.set_yscale("log")
    below.set_ylabel("relative deviation\nfrom no compile")
    below.set_xlabel("step" + (f"    ({', '.join(exact)}: no deviation at any step)" if exact else ""))
    below.legend(loc="upper left", fontsize="small")
    below.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
