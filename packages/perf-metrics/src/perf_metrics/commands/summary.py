"""`perf-metrics summary`: the figures of one or several runs as a table."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..logs.run_log import default_names, read_run
from ..logs.summary import summary_of
from ..logs.summary_table import summary_json, summary_lines
from .logs_argument import add_logs_argument

if TYPE_CHECKING:
    from .parser import Subparsers


def add_summary(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "summary",
        help="show steps, losses, speed, utilization, memory and time of runs",
        description="Show the figures of runs, one a row; n/a: the log does not tell. Speed and utilization "
        "are medians over the log entries.",
    )
    add_logs_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="write JSON, in tokens per second, seconds, bytes and shares"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    names = default_names(options.logs)
    summaries = [summary_of(read_run(log), name) for log, name in zip(options.logs, names, strict=True)]
    if options.json:
        print(json.dumps([summary_json(summary) for summary in summaries], indent=2))
    else:
        print("\n".join(summary_lines(summaries)))
    return 0
