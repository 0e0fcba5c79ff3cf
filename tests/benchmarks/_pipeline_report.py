"""What the pipeline benchmark found: its samples brought down to figures, tables of them, and pictures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _pipeline_accumulation as accumulation
from _pipeline_bubble import MICROBATCHES, RANKS
from _pipeline_generation import ALONE, CACHED, LENGTHS, SIZES, WHOLE
from _pipeline_steps import BARE, BARE_FUSED, CONTENDERS

from trainer_pipeline.diagram import Timeline, draw_schedule, simulate, textbook_bubble

DRAWN = ("gpipe", "1f1b", "zbv")
Told = Sequence[Mapping[str, Any]]
"""What each rank told of one task."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and 10th and 90th percentile, of which the first one is called quiet."""
    if len(values) < 2:
        return dict.fromkeys(("median", "quiet", "high"), values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "quiet": tenths[0], "high": tenths[-1]}


def summarise_bubble(schedule: str, rounds: Sequence[Told]) -> dict[str, Any]:
    """The figures of a schedule."""
    predicted = simulate(schedule, RANKS, MICROBATCHES)
    passes: dict[str, list[float]] = defaultdict(list)
    for told in rounds:
        for rank in told:
            for _, work in rank["steps"]:
                for stage, kind, _, start, end in work:
                    name = f"{kind} of stage 0" if stage == 0 else kind
                    passes[name].append((end - start) * 1e3 * predicted.stages_per_rank)
    return {
        "stages_per_rank": predicted.stages_per_rank,
        "predicted": predicted.bubble,
        "textbook": textbook_bubble(schedule, RANKS, MICROBATCHES),
        # All ranks log the same share.
        "measured": spread([share for told in rounds for share in told[0]["bubble_share"]]),
        "steps": sum(len(told[0]["bubble_share"]) for told in rounds),
        "pass_ms": {name: spread(values) for name, values in sorted(passes.items())},
    }


def quietest_step(schedule: str, rounds: Sequence[Told]) -> Timeline:
    """What the ranks did in the step in which they waited least, in milliseconds."""
    found: list[Timeline] = []
    for told in rounds:
        for steps in zip(*(rank["steps"] for rank in told), strict=True):
            # The ranks of a host have one clock.
            work = [
                [
                    (stage, kind, number, (began + start) * 1e3, (began + end) * 1e3)
                    for stage, kind, number, start, end in each
                ]
                for began, each in steps
            ]
            found.append(Timeline.of_work(schedule, work, "ms"))
    return min(found, key=lambda timeline: timeline.bubble)


def draw(folder: Path, bubbles: Mapping[str, Sequence[Told]]) -> list[Path]:
    """Draw the quietest step of some schedules below its prediction."""
    return [
        draw_schedule(
            name,
            RANKS,
            MICROBATCHES,
            folder / f"pipeline-{name}.png",
            measured=quietest_step(name, bubbles[name]),
        )
        for name in DRAWN
        if name in bubbles
    ]


def bubble_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The table of the schedules."""
    table = [
        [
            "schedule",
            "stages per rank",
            "textbook",
            "predicted",
            "measured, quiet",
            "median (to 90 %)",
            "ms of a pass and rank, median",
        ]
    ]
    for name, told in summary.items():
        measured, formula = told["measured"], told["textbook"]
        passes = ", ".join(f"{kind} {ms['median']:.1f}" for kind, ms in told["pass_ms"].items())
        table.append(
            [
                name,
                str(told["stages_per_rank"]),
                "" if formula is None else f"{formula:.1%}",
                f"{told['predicted']:.1%}",
                f"{measured['quiet']:.1%}",
                f"{measured['median']:.1%} ({measured['high']:.1%})",
                passes,
            ]
        )
    return table


def summarise_generation(
    rounds: Sequence[Mapping[int, Told]], lengths: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """The figures of generation, by ranks and way: for each length seconds, and processor time of all."""
    found: dict[str, dict[str, Any]] = {}
    for size in SIZES:
        for way in (ALONE, CACHED, WHOLE) if size == 1 else (CACHED, WHOLE):
            name = f"{size} {'rank' if size == 1 else 'ranks'}, {way}"
            found[name] = {}
            for place, length in enumerate(lengths):
                texts = [[rank[way][place] for rank in told[size]] for told in rounds]
                alone = [told[1][0][CACHED][place].wall for told in rounds]
                wall = [max(text.wall for text in by_rank) for by_rank in texts]
                cpu = [sum(text.cpu for text in by_rank) / length * 1e3 for by_rank in texts]
                found[name][str(length)] = {
                    "seconds": spread(wall),
                    "tokens_per_second_quiet": length / spread(wall)["quiet"],
                    "cpu_ms_per_token": spread(cpu),
                    "of_one_process": spread([one / own for one, own in zip(alone, wall, strict=True)]),
                }
    return found


def generation_rows(summary: Mapping[str, Any], lengths: Sequence[int] = LENGTHS) -> list[list[str]]:
    """The table of generation."""
    head = [f"{length} tokens: tokens/s, quiet (of one process, median)" for length in lengths]
    table = [["", *head, *(f"CPU ms per token, all ranks, {length}" for length in lengths)]]
    for name, told in summary.items():
        each = [told[str(length)] for length in lengths]
        speeds = [
            f"{one['tokens_per_second_quiet']:.0f} ({one['of_one_process']['median']:.2f})" for one in each
        ]
        table.append([name, *speeds, *(f"{one['cpu_ms_per_token']['quiet']:.2f}" for one in each)])
    return table


def summarise_steps(rounds: Sequence[Told]) -> dict[str, Any]:
    """The figures of one model, by contender: means of the ranks.

    A paired ratio is that of two contenders in one turn.
    """

    def ranks(told: Told, label: str, clock: str) -> list[list[float]]:
        # Only the first rank hands over, and knows the time without that of the others' turns.
        return [rank["contenders"][label][clock] for rank in (told if clock == "cpu" else told[:1])]

    samples: dict[str, dict[str, list[list[float]]]] = {
        label: {
            clock: [
                [statistics.fmean(window) for window in zip(*ranks(told, label, clock), strict=True)]
                for told in rounds
            ]
            for clock in ("cpu", "wall")
        }
        for label in CONTENDERS
    }
    return {label: _compared(label, samples) for label in CONTENDERS} | {
        "largest_deviation": {
            kind: max(
                deviation.get(kind, 0.0)
                for told in rounds
                for rank in told
                for deviation in rank["deviations"].values()
            )
            for kind in ("loss", "weights")
        }
    }


def _compared(label: str, samples: Mapping[str, Mapping[str, list[list[float]]]]) -> dict[str, Any]:
    def over(other: str, clock: str) -> dict[str, Any]:
        own, beside = samples[label][clock], samples[other][clock]
        pairs = [pair for one, two in zip(own, beside, strict=True) for pair in zip(one, two, strict=True)]
        quiet = [spread([value for each in part for value in each])["quiet"] for part in (own, beside)]
        return {
            "ms_quiet": quiet[0] - quiet[1],
            "ratio_quiet": quiet[0] / quiet[1],
            "ratio": spread([one / two for one, two in pairs]),
        }

    return {
        clock: {
            "ms": spread([value for each in samples[label][clock] for value in each]),
            "over_bare": over(BARE, clock),
            "over_bare_fused": over(BARE_FUSED, clock),
        }
        for clock in ("cpu", "wall")
    }


def step_rows(summary: Mapping[str, Any], shape: str) -> list[list[str]]:
    """The table of one model."""
    table = [
        [
            f"{shape}, CPU ms per step and rank",
            "quiet",
            "over bare, fused: ms, quiet",
            "ratio, quiet",
            "ratio, median (10 % to 90 %)",
            "wall ratio, median (10 % to 90 %)",
        ]
    ]
    for label in CONTENDERS:
        told, wall = summary[label]["cpu"], summary[label]["wall"]
        over, ratio = told["over_bare_fused"], told["over_bare_fused"]["ratio"]
        beside = wall["over_bare_fused"]["ratio"]
        table.append(
            [
                label,
                f"{told['ms']['quiet']:.2f}",
                f"{over['ms_quiet']:+.2f}",
                f"{over['ratio_quiet']:.3f}",
                f"{ratio['median']:.3f} ({ratio['quiet']:.3f} to {ratio['high']:.3f})",
                f"{beside['median']:.3f} ({beside['quiet']:.3f} to {beside['high']:.3f})",
            ]
        )
    return table


def summarise_accumulation(rounds: Sequence[Mapping[str, Told]]) -> dict[str, Any]:
    """The figures of a model: of each way, and the ratio of the two in each round."""
    found: dict[str, Any] = {}
    medians: dict[str, list[float]] = {}
    for way in accumulation.WAYS:
        shares = [share for told in rounds for share in told[way][0]["bubble_share"]]
        # A step takes as long as on the slowest rank.
        steps = [list(map(max, *(rank["seconds"] for rank in told[way]))) for told in rounds]
        medians[way] = [statistics.median(each) for each in steps]
        seconds = [value for each in steps for value in each]
        found[way] = {"bubble_share": spread(shares), "step_ms": spread([1e3 * each for each in seconds])}
    one, four = (medians[way] for way in accumulation.WAYS)
    return {**found, "ratio": spread([a / b for a, b in zip(one, four, strict=True)])}


def accumulation_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The table of the two ways."""
    table = [["model", "way", "bubble", "predicted", "step ms", "of four schedules"]]
    for model, told in summary.items():
        for way in accumulation.WAYS:
            batches = accumulation.BATCHES if way == accumulation.WAYS[0] else 1
            predicted = simulate("1f1b", accumulation.RANKS, batches * accumulation.MICROBATCHES).bubble
            ratio = told["ratio"]
            ratios = f"{ratio['median']:.2f} ({ratio['quiet']:.2f} to {ratio['high']:.2f})"
            table.append(
                [
                    model,
                    way,
                    f"{told[way]['bubble_share']['median']:.1%}",
                    f"{predicted:.1%}",
                    f"{told[way]['step_ms']['median']:.0f}",
                    ratios if batches > 1 else "",
                ]
            )
    return table
