"""What the low-bandwidth study tells: a table, and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _low_bandwidth_modes import BASE, modes

_COLOURS = {"DDP": "black", "powerSGD": "tab:green", "PostLocalSGD": "tab:blue", "DiLoCo": "tab:orange"}
_MARKERS = "os^D"
_TOLERANCE = 2.0
"""Percent: what the modes are asked to keep within."""


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The table of a study."""
    table = [
        [
            "mode",
            "settings",
            "held-out loss",
            "over DDP %",
            "kB / 1000 tokens",
            "DDP sends x",
            "kB after warm-up",
            "loopback kB / 1000 tokens",
            "loopback less counted",
            "s",
        ]
    ]
    for name, told in results["modes"].items():
        counted, seen = per_1k(told, "counted_bytes"), per_1k(told, "loopback_bytes")
        table.append(
            [
                told["label"],
                told["told"],
                f"{loss(told):.4f}",
                "" if name == BASE else f"{over_base(told, results):+.2f}",
                f"{counted / 1e3:,.1f}" if counted is not None else "",
                f"{less_than_base(told, results):.3g}",
                f"{after_warm_up(name, results) / 1e3:,.1f}",
                f"{seen / 1e3:,.1f}" if seen is not None else "",
                f"{(seen - counted) / 1e3:,.1f}" if seen is not None and counted is not None else "",
                f"{told['seconds']:.0f}",
            ]
        )
    return table


def loss(told: Mapping[str, Any]) -> float:
    """Held-out loss at the end, in nats per token."""
    return float(told["curve"][-1][1])


def over_base(told: Mapping[str, Any], results: Mapping[str, Any]) -> float:
    """By how many percent the held-out loss is above that of ordinary DDP."""
    return 100 * (loss(told) / loss(results["modes"][BASE]) - 1)


def less_than_base(told: Mapping[str, Any], results: Mapping[str, Any]) -> float:
    """How many times as much as this mode ordinary DDP sends."""
    return float(results["modes"][BASE]["counted_bytes"] / told["counted_bytes"])


def after_warm_up(name: str, results: Mapping[str, Any]) -> float:
    """Counted bytes per 1000 tokens of the steps after the first ones, which are ordinary training."""
    told, steps = results["modes"][name], results["steps"]
    first = modes(steps)[name].warm_up
    warming_up = results["modes"][BASE]["counted_bytes"] * first / steps
    return float((told["counted_bytes"] - warming_up) / (told["tokens"] * (1 - first / steps)) * 1000)


def per_1k(told: Mapping[str, Any], kind: str) -> float | None:
    """Bytes per 1000 tokens, all ranks together; None where they were not measured."""
    return None if told[kind] is None else told[kind] / told["tokens"] * 1000


def plot(path: Path, results: Mapping[str, Any]) -> None:
    """Draw held-out loss over tokens, and the loss at the end over the bytes that it took."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    styles = _styles(results["modes"])
    _draw_curves(left, results, styles)
    _draw_cost(right, results, styles)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_curves(axes: Any, results: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
    for name, told in results["modes"].items():
        tokens, losses = zip(*told["curve"], strict=True)
        axes.plot(
            [count / 1e6 for count in tokens],
            losses,
            **styles[name],
            linewidth=2.5 if name == BASE else 1.2,
            markersize=5,
            label=f"{told['label']}, {told['told']}",
        )
    axes.set(xlabel="million tokens, all ranks together", ylabel="held-out loss, nats per byte")
    axes.set_title("Held-out loss over tokens")
    axes.grid(alpha=0.3)


def _draw_cost(axes: Any, results: Mapping[str, Any], styles: Mapping[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    for name, told in results["modes"].items():
        place = told["counted_bytes"] / told["tokens"]  # as many kB per 1000 tokens
        axes.plot(place, over_base(told, results), **styles[name], linestyle="", markersize=9)
    axes.axhspan(-_TOLERANCE, _TOLERANCE, color="tab:green", alpha=0.08)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="counted kB per 1000 tokens", ylabel="held-out loss over DDP, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 4, 5, 7)))
    axes.set_title(f"Loss at the end over bytes; shaded: within {_TOLERANCE:g} %")
    axes.grid(alpha=0.3, which="both")
    axes.margins(0.08)


def _styles(told_modes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """A colour for each kind of mode, and a marker for each of its rows."""
    styles: dict[str, dict[str, str]] = {}
    for kind, colour in _COLOURS.items():
        names = [name for name, told in told_modes.items() if told["label"] == kind]
        for name, marker in zip(names, itertools.cycle(_MARKERS), strict=False):
            styles[name] = {"color": colour, "marker": marker}
    return styles
