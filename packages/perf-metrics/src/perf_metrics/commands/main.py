"""The console script `perf-metrics`: its subcommands, and one line for bad input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import NoReturn

from . import OneLineParser

PROGRAM = "perf-metrics"
COMMANDS = {
    "plot": ("logs", "fill_plot", "draw loss, speed, utilization, memory and learning rate of runs"),
    "summary": ("logs", "fill_summary", "show steps, losses, speed, utilization, memory and time of runs"),
    "compare": ("logs", "fill_compare", "compare two runs: which is faster, or how long to measure to tell"),
    "goodput": ("logs", "fill_goodput", "what the device time of a run was spent on, restarts included"),
    "flops": ("flops", "fill_flops", "FLOPs per token of a model, from its config.json"),
    "gemm": (
        "gemm",
        "fill_gemm",
        "extra work of a matrix multiplication in whole tiles, and OFU beside a measured one",
    ),
    "trace": (
        "trace",
        "fill_trace",
        "what the steps in traces of torch.profiler are spent on, tile overhead, and adjusted OFU",
    ),
    "watch": ("ofu", "fill_watch", "show OFU, tensor activity and clocks of this node's GPUs, live"),
    "fleet": (
        "fleet",
        "fill_fleet",
        "report OFU of every job of a fleet out of Prometheus, beside the MFU that the jobs report",
    ),
    "fleet-files": (
        "fleet",
        "fill_fleet_files",
        "write rules and alerts for Prometheus and a dashboard for Grafana that show OFU of a fleet",
    ),
}
"""Module, function and help of each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; None means those of this process.

    Returns:
        Exit status: 0; 1 if a library that a subcommand needs is not installed; 2 for bad input; 130 after
        Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Keep the interpreter from flushing into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    except ModuleNotFoundError as error:
        return _complain(error, 1)
    return status


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog=PROGRAM, description="What training runs did and what models cost: pictures and tables."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (_, _, text) in COMMANDS.items():
        commands.add_parser(name, help=text, fill=partial(_fill, name))
    return parser


def _fill(name: str, parser: OneLineParser) -> None:
    module, function, _ = COMMANDS[name]
    getattr(import_module(f".{module}", __package__), function)(parser)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Imported here: it takes longer than all the rest of a help text.
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        parser.exit()


def _complain(error: Exception, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
    return status
