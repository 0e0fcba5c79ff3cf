"""The command line: `python -m dist_env doctor`, alone or under torchrun, and `python -m dist_env layout`."""

from __future__ import annotations

import argparse
import sys

from dist_env import doctor, layout_view


def main() -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dist_env",
        description="Which rank am I, on what device, and is the process group healthy?",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="look at every rank, check and time the all-reduce, warn of settings that slow a job down",
            description="Run alone for one process, or on every rank: "
            "torchrun --nproc-per-node 4 -m dist_env doctor. "
            "Exit code: 0 healthy, 1 problems, 2 a wrong variable or option.",
        )
    )
    layout_view.add_arguments(
        commands.add_parser(
            "layout",
            help="show which rank is where in a parallel layout, and which data it reads",
            description="Show where each rank of a layout is: "
            "python -m dist_env layout --world 64 shard=8,tp=4,pp=2. "
            "Exit code: 0 shown, 1 the picture cannot be written, 2 a wrong layout or option.",
        )
    )
    options = parser.parse_args()
    return layout_view.run(options) if options.command == "layout" else doctor.run(options)


if __name__ == "__main__":
    sys.exit(main())
