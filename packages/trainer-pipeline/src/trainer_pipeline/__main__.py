"""`python -m trainer_pipeline diagram`: draw what each rank of a schedule does, and when it waits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dist_env import HelpFormatter, add_version
from trainer_core import ConfigurationError

from .schedules import SCHEDULES

if TYPE_CHECKING:
    from .diagram import Timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: `diagram` prints a schedule with its predicted bubble, and draws it if asked.

    Args:
        argv: Arguments after the program's name; by default those of the process.

    Returns:
        0; wrong arguments end the process with status 2 and a message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    from .diagram import draw_schedule, simulate  # with torch, for which help does not wait
    from .diagram.drawing import timeline_text

    stages: int | None = args.stages_per_rank
    try:
        timeline = simulate(args.schedule, args.ranks, args.microbatches, stages_per_rank=stages)
        print(timeline_text(timeline), end="")
        print(_figures(timeline))
        if args.output is not None:
            print(
                draw_schedule(
                    args.schedule, args.ranks, args.microbatches, args.output, stages_per_rank=stages
                )
            )
    except (ConfigurationError, ModuleNotFoundError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(
        prog="python -m trainer_pipeline",
        description="What the ranks of a pipeline do.",
        formatter_class=HelpFormatter,
    )
    add_version(program, "trainer-pipeline")
    commands = program.add_subparsers(metavar="COMMAND", required=True)
    parser = commands.add_parser(
        "diagram",
        help="what each rank computes and when it waits, as text or as a picture",
        description="Print what each rank of a pipeline computes and when it waits, if a backward pass takes "
        "as long as two forward passes and all stages cost the same.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--schedule", required=True, metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the pipeline")
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="N", help="microbatches of one step"
    )
    parser.add_argument(
        "--stages-per-rank",
        type=int,
        metavar="N",
        help="stages on each rank; by default 1, or 2 for schedules with several",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="draw the diagram into this .png or .svg")
    return program


def _figures(timeline: Timeline) -> str:
    from .diagram import textbook_bubble
    from .diagram.drawing import percent

    formula = textbook_bubble(
        timeline.schedule, timeline.ranks, timeline.microbatches, timeline.stages_per_rank
    )
    flights = ", ".join(f"{peak:.3g}" for peak in timeline.peak_in_flight)
    return "\n".join(
        [
            f"predicted bubble: {percent(timeline.bubble)} "
            f"(between each rank's first and last pass: {percent(timeline.bubble_between)})",
            f"textbook formula: {'none' if formula is None else percent(formula)}",
            f"microbatches in flight at most, by rank: {flights}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
