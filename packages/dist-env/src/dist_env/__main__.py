"""The command line: `python -m dist_env doctor`, alone or under torchrun."""

from __future__ import annotations

import argparse
import sys

from dist_env import doctor


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
    return doctor.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
