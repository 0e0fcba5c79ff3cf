"""Measure pipeline training: waiting beside what is predicted, what a step costs, how fast ranks write.

    python tests/benchmarks/pipeline.py --json pipeline.json --plot docs/performance

Worlds of one, two and four ranks over gloo on this machine, one thread each, stay for the whole benchmark and
take turns: each round does all of the following once.

Bubble: four ranks, eight microbatches, every schedule. The model is eight blocks that sleep, in their forward
pass, in the backward pass for their input and in that for their weight, each for as long: so four ranks fit
on two cores, and passes cost what the textbook assumes. Measured is `bubble_share` of the trainer's log, step
by step; predicted is what `trainer_pipeline.diagram.simulate` computes from torch's schedule. Messages are
real and take time, which the prediction leaves out; longer passes (``--milliseconds``) make that matter less.
On the first stage, torch computes all gradients at once when the schedule asks for those of the weights, in
twice the time: nobody waits for those of its input.

Accumulation: two ranks take steps of four batches of four microbatches by 1f1b, all in one schedule and, as
before this was done, in a schedule for each batch, in turn. The models are the one that sleeps and one that
computes. Other losses are an error.

Generation: a Llama continues 16 tokens of one row greedily, together with `pipeline_generate`, with and
without keys and values kept, and alone. A text that is not that of one process, token for token, is an error.
Time is that of the slowest rank; processor time is that of all ranks together.

Steps: two ranks train a Llama of two layers by 1f1b, with `PipelineTrainer` and with a bare loop around
torch.distributed.pipelining that is cut by hand; another loss, or other weights, in the end is an error. CPU
milliseconds of a process with all of its threads, mean of the ranks. They have processes of their own, which
take turns of 50 steps, so that ratios are of moments of the same machine. There are no peers: Lightning and
Hugging Face Trainer train no pipelines, Accelerate runs them for inference only.

"Quiet" is the 10th percentile of all samples: what it costs when little else runs. Nothing is asserted about
time. ``--quick`` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import _pipeline_accumulation as accumulation
import _pipeline_bubble as bubble
import _pipeline_generation as generation
import _pipeline_steps as steps
from _pipeline_report import (
    accumulation_rows,
    bubble_rows,
    draw,
    generation_rows,
    step_rows,
    summarise_accumulation,
    summarise_bubble,
    summarise_generation,
    summarise_steps,
)
from _pipeline_worlds import World, take_turns
from _step_work import LOG_EVERY
from _timing import machine, print_table

PARTS = {
    "bubble": {bubble.RANKS},
    "accumulation": {accumulation.RANKS},
    "generation": set(generation.SIZES),
    "steps": set(),  # they make their own
}
"""And the sizes of the worlds that each one takes."""
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipe_v",
)
ROUNDS, STEPS, WINDOWS, MILLISECONDS = 5, 3, 1, 40.0


class Samples:
    """What the worlds told, round by round."""

    def __init__(self) -> None:
        self.bubbles: dict[str, list[Any]] = defaultdict(list)
        self.accumulated: dict[str, list[Any]] = defaultdict(list)
        self.texts: list[dict[int, list[Any]]] = []
        self.checks: list[dict[str, int]] = []
        self.steps: dict[str, list[Any]] = defaultdict(list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    samples = Samples()
    sizes = sorted({size for part in options.only for size in PARTS[part]})
    with tempfile.TemporaryDirectory(prefix="pipeline-benchmark-") as folder, ExitStack() as stack:
        worlds = {size: stack.enter_context(World(size)) for size in sizes}
        began = time.monotonic()
        for number in range(options.rounds):
            for part in options.only:
                _ROUND[part](worlds, samples, options, folder, number)
                minutes = (time.monotonic() - began) / 60
                print(f"[{minutes:5.1f} min] round {number + 1}/{options.rounds}: {part}", flush=True)
    results = _results(samples, options)
    _print(results, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        for path in draw(options.plot, samples.bubbles):
            print(path)


def _bubble_round(
    worlds: dict[int, World], samples: Samples, options: argparse.Namespace, folder: str, number: int
) -> None:
    for name in _turned(SCHEDULES, number):
        told = worlds[bubble.RANKS].run(
            bubble.measure,
            schedule=name,
            steps=options.steps,
            milliseconds=options.milliseconds,
            directory=folder,
        )
        samples.bubbles[name].append(told)


def _accumulation_round(
    worlds: dict[int, World], samples: Samples, options: argparse.Namespace, folder: str, number: int
) -> None:
    for model in accumulation.MODELS:
        told = {
            way: worlds[accumulation.RANKS].run(
                accumulation.measure,
                model=model,
                way=way,
                steps=options.steps,
                milliseconds=options.milliseconds / 4,
                directory=folder,
            )
            for way in _turned(accumulation.WAYS, number)
        }
        accumulation.check(told)
        samples.accumulated[model].append(told)


def _generation_round(
    worlds: dict[int, World], samples: Samples, options: argparse.Namespace, folder: str, number: int
) -> None:
    told = {
        size: worlds[size].run(generation.write, lengths=options.lengths, directory=folder)
        for size in _turned(generation.SIZES, number)
    }
    samples.checks.append(generation.check(told))
    samples.texts.append(told)


def _steps_round(
    worlds: dict[int, World], samples: Samples, options: argparse.Namespace, folder: str, number: int
) -> None:
    given = {"windows": options.windows, "directory": folder}
    with ExitStack() as stack:
        # Each has its own: a trainer switches things in its process, such as the collection of garbage.
        own = {label: stack.enter_context(World(2)) for label in _turned(steps.CONTENDERS, number)}
        for shape in steps.SHAPES:
            told = take_turns(
                own, steps.measure, {label: {**given, "label": label, "shape": shape} for label in own}
            )
            samples.steps[shape].append(steps.figures(told))


_ROUND = {
    "bubble": _bubble_round,
    "accumulation": _accumulation_round,
    "generation": _generation_round,
    "steps": _steps_round,
}


def _turned(items: Sequence[Any], number: int) -> list[Any]:
    shift = number % len(items)
    return [*items[shift:], *items[:shift]]


def _results(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "benchmark": "pipeline",
        "machine": machine(Path.cwd(), ("torch",)),
        "method": {"backend": "gloo", "threads": 1, "rounds": options.rounds},
    }
    if "bubble" in options.only:
        found["bubble"] = {
            "ranks": bubble.RANKS,
            "microbatches": bubble.MICROBATCHES,
            "milliseconds": options.milliseconds,
            "schedules": {name: summarise_bubble(name, samples.bubbles[name]) for name in SCHEDULES},
        }
    if "accumulation" in options.only:
        found["accumulation"] = {
            "ranks": accumulation.RANKS,
            "batches": accumulation.BATCHES,
            "microbatches": accumulation.MICROBATCHES,
            "milliseconds": options.milliseconds / 4,
            "models": {
                name: summarise_accumulation(samples.accumulated[name]) for name in accumulation.MODELS
            },
        }
    if "generation" in options.only:
        found["generation"] = {
            "layers": generation.LAYERS,
            "prompt": generation.PROMPT,
            "checks": samples.checks,
            "ways": summarise_generation(samples.texts, options.lengths),
        }
    if "steps" in options.only:
        found["steps"] = {
            "microbatches": steps.MICROBATCHES,
            "rows": steps.ROWS,
            "window_steps": LOG_EVERY,
            "shapes": {name: summarise_steps(samples.steps[name]) for name in steps.SHAPES},
        }
    return found


def _print(results: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"\nload average at the end: {results['machine']['load_average']}")
    if "bubble" in results:
        print(f"\nbubble: {bubble.RANKS} ranks, {bubble.MICROBATCHES} microbatches")
        print_table(bubble_rows(results["bubble"]["schedules"]))
    if "accumulation" in results:
        told = results["accumulation"]
        sizes = f"{told['batches']} batches of {told['microbatches']} microbatches"
        print(f"\naccumulation: {told['ranks']} ranks, {sizes}")
        print_table(accumulation_rows(told["models"]))
    if "generation" in results:
        told = results["generation"]
        same = sum(check["same"] for check in told["checks"])
        distinct = min(check["distinct_tokens"] for check in told["checks"])
        print(
            f"\ngeneration: {same} texts are those of one process; {distinct} different tokens in the longest"
        )
        print_table(generation_rows(told["ways"], options.lengths))
    if "steps" in results:
        for name, told in results["steps"]["shapes"].items():
            print()
            print_table(step_rows(told, name))
            far = ", ".join(f"{kind} {value:.1e}" for kind, value in told["largest_deviation"].items())
            print(f"largest deviation from the bare loop: {far}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of everything (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="steps of a schedule in a round that count (%(default)s)"
    )
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=MILLISECONDS,
        help="that a pass of a microbatch takes on a rank (%(default)s)",
    )
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of 50 steps (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw three schedules into this folder")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(PARTS)}")
    for name in ("rounds", "steps", "windows", "milliseconds"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be above 0")
    options.lengths = generation.LENGTHS
    if options.quick:
        options.rounds = options.steps = options.windows = 1
        options.milliseconds, options.lengths = 4.0, (8, 16)
    return options


if __name__ == "__main__":
    main()
