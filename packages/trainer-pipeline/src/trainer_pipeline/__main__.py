"""`python -m trainer_pipeline diagram`: draw what each rank of a schedule does, and when it waits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_core import ConfigurationError

from .diagram import Timeline, draw_schedule, simulate, textbook_bubble
from .diagram.drawing import percent, timeline_text
from .schedules import SCHEDULES


def main(argv: Sequence[str] | None = None) -> int:
    """Print the diagram of a schedule with its predicted bubble, and draw it into a file if asked.

    Args:
        argv: Arguments after the command's name; by default those of the process.

    Returns:
        0; wrong arguments end the process with status 2 and a message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
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
    parser = argparse.ArgumentParser(
        prog="python -m trainer_pipeline diagram",
        description="Print what each rank of a pipeline computes and when it waits, if a backward pass takes "
        "as long as two forward passes and all stages cost the same.",
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
    return parser


def _figures(timeline: Timeline) -> str:
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
    if sys.argv[1:2] != ["diagram"]:
        sys.exit("usage: python -m trainer_pipeline diagram --schedule NAME --ranks N --microbatches N")
    sys.exit(main(sys.argv[2:]))
