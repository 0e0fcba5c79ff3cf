"""What the metrics benchmark tells: a summary of its stretches, and two tables."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _metrics_contenders import OURS, Contender
from _metrics_turns import STRETCH, TURN
from _step_work import Window

Stretches = Mapping[str, Sequence[Window]]
"""By label, those of one round after the other."""
Rounds = Sequence[Sequence[float]]
"""A figure of each stretch of each round."""
Handlers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Microseconds by callback and event."""
RESAMPLES = 500
_PARTS = ("median", "quiet", "high")
AIM = 0.01
"""Most that the callbacks may cost, as a share of a step."""


def summarise(chosen: Sequence[Contender], stretches: Stretches) -> dict[str, Any]:
    """The figures of one size, by label.

    Two contenders are compared stretch by stretch, each with the one beside it in time. Log entries fall into
    the same stretches of every round, so the median over the rounds is taken for each place in a round, and
    then the mean of these: what disturbs single stretches drops out, what an entry costs does not. "interval"
    holds 95 % of what comes out if the rounds are drawn anew, with replacement.
    """
    silent = next(contender.label for contender in chosen if contender.every is None)
    cpu = {label: _rounds([stretch.cpu for stretch in told]) for label, told in stretches.items()}
    told = {}
    for contender in chosen:
        own = cpu[contender.label]
        told[contender.label] = {
            "trainer": contender.trainer,
            "every": contender.every,
            "shows": contender.shows,
            "cpu_ms": _spread(own),
            "over_none": _compare(own, cpu[silent]) if _logs_each_step(contender) else None,
            "over_without": _compare(own, cpu[_without(contender, chosen)]) if contender.shows else None,
        }
    return told


def _rounds(values: Sequence[float]) -> Rounds:
    places = TURN // STRETCH
    return [values[at : at + places] for at in range(0, len(values), places)]


def _logs_each_step(contender: Contender) -> bool:
    """Whether it is ours without callbacks, in one group with the one that logs nothing."""
    return contender.trainer == OURS and contender.every == 1 and not contender.shows


def _without(contender: Contender, chosen: Sequence[Contender]) -> str:
    return next(
        other.label
        for other in chosen
        if not other.shows and (other.trainer, other.every) == (contender.trainer, contender.every)
    )


def _compare(cpu: Rounds, beside: Rounds) -> dict[str, Any]:
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(cpu, beside, strict=True)]
    step = _typical(beside)
    told = _spread([[(one - other) * 1e3 for one, other in pair] for pair in pairs])
    return {"microseconds": told, "share": {name: _over(value, step) for name, value in told.items()}}


def _over(microseconds: Any, step: float) -> Any:
    if isinstance(microseconds, list):
        return [value / step / 1e3 for value in microseconds]
    return microseconds / step / 1e3


def _spread(rounds: Rounds) -> dict[str, Any]:
    drawn = random.Random(0)
    again = sorted(_typical(drawn.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    tenths = statistics.quantiles([statistics.fmean(told) for told in rounds], n=10)
    return {
        "typical": _typical(rounds),
        "interval": [again[int(RESAMPLES * 0.025)], again[int(RESAMPLES * 0.975)]],
        "quiet": tenths[0],
        "high": tenths[-1],
    }


def _typical(rounds: Rounds) -> float:
    return statistics.fmean(statistics.median(place) for place in zip(*rounds, strict=True))


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
                f"{without['cpu_ms']['typical']:.3f}",
                f"{micro['typical']:+.0f}",
                f"{micro['interval'][0]:+.0f} to {micro['interval'][1]:+.0f}",
                f"{share['typical']:+.2%}",
                f"{share['interval'][0]:+.2%} to {share['interval'][1]:+.2%}",
                f"{share['quiet']:+.1%} to {share['high']:+.1%}",
            ]
        )
    return table


def logging_line(size: str, summary: Mapping[str, Any]) -> str:
    """What the loop's own entries add, without any callback, to a run that logs nothing."""
    told = next(told["over_none"] for told in summary.values() if told["over_none"])
    micro, share = told["microseconds"], told["share"]
    return (
        f"{size}, an entry every step and no callbacks, over no entries: {micro['typical']:+.0f} us "
        f"({micro['interval'][0]:+.0f} to {micro['interval'][1]:+.0f}), {share['typical']:+.2%} of a step"
    )


def handler_rows(size: str, handlers: Handlers, step_ms: float) -> list[list[str]]:
    """What each callback costs by itself, and what that is of a step."""
    entry_of = {
        name: {part: told["on_log_step"][part] + told["on_log"][part] for part in _PARTS}
        for name, told in handlers.items()
    }
    rows = [
        _handler_row(name, told["on_step_end"]["median"], entry_of[name], step_ms)
        for name, told in handlers.items()
    ]
    entries = {part: sum(entry[part] for entry in entry_of.values()) for part in _PARTS}
    steps = sum(told["on_step_end"]["median"] for told in handlers.values())
    heading = [
        f"{size}, us of CPU time",
        "each step",
        "each entry",
        "10 % to 90 %",
        "of a step, entry at each",
    ]
    return [heading, *rows, _handler_row("all", steps, entries, step_ms)]


def _handler_row(name: str, step: float, entry: Mapping[str, float], step_ms: float) -> list[str]:
    return [
        name,
        f"{max(step, 0.0):.1f}",
        f"{entry['median']:.0f}",
        f"{entry['quiet']:.0f} to {entry['high']:.0f}",
        f"{(step + entry['median']) / step_ms / 1e3:.2%}",
    ]


def verdict(size: str, summary: Mapping[str, Any], handlers: Handlers, step_ms: float) -> list[str]:
    """Whether the time spent in the callbacks is under the aim, and what the whole runs say to it."""
    step = sum(told["on_step_end"]["median"] for told in handlers.values())
    entry = sum(told[event]["median"] for told in handlers.values() for event in ("on_log_step", "on_log"))
    lines = []
    for told in summary.values():
        if told["trainer"] == OURS and told["shows"]:
            share = (step + entry / told["every"]) / step_ms / 1e3
            low, high = told["over_without"]["share"]["interval"]
            lines.append(
                f"{size}, an entry every {_steps(told['every'])}: {share:.2%} of a step in the callbacks, "
                f"under {AIM:.0%}: {'yes' if share < AIM else 'no'}; whole runs: {low:.2%} to {high:.2%}"
            )
    return lines


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"
