"""The command line: `python -m dist_env doctor`, alone or under torchrun, and `python -m dist_env layout`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich_argparse import RichHelpFormatter

from dist_env.command_line import add_version


def main() -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dist_env",
        description="Which rank am I, on what device, and is the process group healthy?",
        formatter_class=_Help,
    )
    add_version(parser, "dist-env")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_doctor(
        commands.add_parser(
            "doctor",
            help="look at every rank, try out devices, links and all-reduces, warn of slow settings",
            description="Run alone for one process, or on every rank: "
            "torchrun --nproc-per-node 4 -m dist_env doctor. "
            "With --dump, explain a hang by the traces of its ranks instead. "
            "Exit code: 0 healthy, 1 problems, 2 a wrong variable, option or directory.",
            formatter_class=_Help,
        )
    )
    _add_layout(
        commands.add_parser(
            "layout",
            help="show which rank is where in a parallel layout, and which data it reads",
            description="Show where each rank of a layout is: "
            "python -m dist_env layout --world 64 shard=8,tp=4,pp=2. "
            "Exit code: 0 shown, 1 the picture cannot be written, 2 a wrong layout or option.",
            formatter_class=_Help,
        )
    )
    options = parser.parse_args()
    # Imported when it is needed: help, usage errors, layouts and traces do without torch.
    if options.command == "layout":
        from dist_env import layout_view

        return layout_view.run(options)
    if options.dump is not None:
        from dist_env import hang_report

        return hang_report.run(options)
    from dist_env import doctor

    return doctor.run(options)


class _Help(RichHelpFormatter):
    text_markup = help_markup = False  # square brackets are text


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--backend", help="collective backend; default: the one for the device")
    parser.add_argument("--no-accelerator", action="store_true", help="use the CPU")
    parser.add_argument("--max-bytes", type=_positive, help="largest transfer to time, in bytes")
    parser.add_argument(
        "--dump",
        metavar="DIR",
        type=Path,
        help="explain a hang by the traces that its ranks wrote into DIR, and start nothing",
    )
    parser.add_argument(
        "--timeout", type=_positive, default=60.0, help="seconds for all ranks to join (default 60)"
    )
    parser.add_argument(
        "--stall-timeout",
        type=_positive,
        default=8.0,
        help="seconds without progress after which the doctor says who is missing and ends (default 8)",
    )


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """The options of `layout`."""
    parser.add_argument("layout", metavar="LAYOUT", help="sizes, such as shard=8,tp=4,pp=2")
    parser.add_argument("--world", metavar="RANKS", help="number of ranks; fills a size that is auto, or dp")
    parser.add_argument("--ranks-per-host", metavar="N", default="8", help="ranks of one host (default 8)")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write a picture, too")


if __name__ == "__main__":
    sys.exit(main())
