"""The console script `perf-metrics`: its subcommands, and one line for bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from . import OneLineParser
from .fleet import add_fleet, add_fleet_files
from .flops import add_flops
from .logs import add_plot, add_summary
from .ofu import add_gemm, add_trace, add_watch

PROGRAM = "perf-metrics"


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
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_plot(commands)
    add_summary(commands)
    add_flops(commands)
    add_gemm(commands)
    add_trace(commands)
    add_watch(commands)
    add_fleet(commands)
    add_fleet_files(commands)
    return parser


def _complain(error: Exception, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
    return status
