"""What the metrics benchmark tells: a summary of its turns, and three tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _metrics_contenders import OURS, Contender
from _step_work import Window

Turns = Mapping[str, Sequence[Window]]
"""By label, one of each round."""
AIM = 0.01
"""Most that the callbacks may cost, as a share of a step."""


def summarise(chosen: Sequence[Contender], turns: Turns) -> dict[str, Any]:
    """The figures of one size, by label.

    A difference is that of two contenders in the same round. "interval" is where the median of all rounds
    lies with a confidence of 95 %, by the ranks of the differences.
    """
    silent = next(contender.label for contender in chosen if contender.every is None)
    told = {}
    for contender in chosen:
        cpu = [turn.cpu for turn in turns[contender.label]]
        told[contender.label] = {
            "trainer": contender.trainer,
            "every": contender.every,
            "shows": contender.shows,
            "cpu_ms": _spread(cpu),
            "over_none": _compare(cpu, turns[silent]) if contender.trainer == OURS else None,
            "over_without": _compare(cpu, turns[_without(contender, chosen)]) if contender.shows else None,
        }
    return told


def _without(contender: Contender, chosen: Sequence[Contender]) -> str:
    return next(
        other.label
        for other in chosen
        if not other.shows and (other.trainer, other.every) == (contender.trainer, contender.every)
    )


def _compare(cpu: Sequence[float], beside: Sequence[Window]) -> dict[str, Any]:
    pairs = [(one, other.cpu) for one, other in zip(cpu, beside, strict=True)]
    return {
        "microseconds": _spread([(one - other) * 1e3 for one, other in pairs]),
        "share": _spread([one / other - 1 for one, other in pairs]),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    ordered, n = sorted(values), len(values)
    away = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - away)), min(n - 1, math.ceil(n / 2 + away) - 1)
    tenths = statistics.quantiles(values, n=10)
    return {
        "median": statistics.median(values),
        "quiet": tenths[0],
        "high": tenths[-1],
        "interval": [ordered[low], ordered[high]],
    }


def difference_rows(size: str, summary: Mapping[str, Any]) -> list[list[str]]:
    """What showing and storing entries adds to a step, as a difference of whole runs."""
    table = [
        [
            f"{size}, CPU time of a step",
            "entry every",
            "without, ms",
            "callbacks add, us",
            "95 % of it",
            "share of a step",
            "95 % of it",
            "single rounds, 10 % to 90 %",
        ]
    ]
    for label, told in summary.items():
        if not told["shows"]:
            continue
        added, without = told["over_without"], summary[label.replace(", with,", ", without,")]
        micro, share = added["microseconds"], added["share"]
        table.append(
            [
                told["trainer"],
                _steps(told["every"]),
                f"{without['cpu_ms']['median']:.3f}",
                f"{micro['median']:+.0f}",
                f"{micro['interval'][0]:+.0f} to {micro['interval'][1]:+.0f}",
                f"{share['median']:+.2%}",
                f"{share['interval'][0]:+.2%} to {share['interval'][1]:+.2%}",
                f"{share['quiet']:+.1%} to {share['high']:+.1%}",
            ]
        )
    return table


def logging_rows(size: str, summary: Mapping[str, Any]) -> list[list[str]]:
    """What the loop's own log entries add, without any callback, to a run that logs nothing."""
    table = [[f"{size}, no callbacks", "CPU ms per step", "over no entries, us", "95 % of it", "share"]]
    for told in summary.values():
        if told["trainer"] != OURS or told["shows"]:
            continue
        micro, share = told["over_none"]["microseconds"], told["over_none"]["share"]
        table.append(
            [
                "no entries" if told["every"] is None else f"an entry every {_steps(told['every'])}",
                f"{told['cpu_ms']['median']:.3f}",
                f"{micro['median']:+.0f}",
                f"{micro['interval'][0]:+.0f} to {micro['interval'][1]:+.0f}",
                f"{share['median']:+.2%}",
            ]
        )
    return table


def handler_rows(size: str, handlers: Mapping[str, Any], step_ms: float) -> list[list[str]]:
    """What each callback costs by itself, and what that is of a step."""
    table = [
        [f"{size}, us of CPU time", "each step", "each entry", "10 % to 90 %", "entry each step, share of a step"]
    ]
    sums = [0.0, 0.0]
    for name, told in handlers.items():
        step = told["on_step_end"]["median"]
        entry = {
            part: told["on_log_step"][part] + told["on_log"][part] for part in ("median", "quiet", "high")
        }
        sums = [sums[0] + step, sums[1] + entry["median"]]
        table.append(_handler_row(name, step, entry["median"], step_ms, entry))
    table.append(_handler_row("all", *sums, step_ms, None))
    return table


def _handler_row(
    name: str, step: float, entry: float, step_ms: float, spread: Mapping[str, float] | None
) -> list[str]:
    return [
        name,
        f"{max(step, 0.0):.1f}",
        f"{entry:.0f}",
        "" if spread is None else f"{spread['quiet']:.0f} to {spread['high']:.0f}",
        f"{(step + entry) / step_ms / 1e3:.2%}",
    ]


def verdict(size: str, summary: Mapping[str, Any]) -> list[str]:
    """At which intervals ours costs less than the aim, by the upper end of the interval of the median."""
    lines = []
    for told in summary.values():
        if told["trainer"] == OURS and told["shows"]:
            share = told["over_without"]["share"]
            low, high = share["interval"]
            word = "met" if high < AIM else "missed" if low > AIM else "not settled"
            lines.append(
                f"{size}, an entry every {_steps(told['every'])}: {share['median']:.2%} of a step "
                f"({low:.2%} to {high:.2%}); under {AIM:.0%}: {word}"
            )
    return lines


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"
