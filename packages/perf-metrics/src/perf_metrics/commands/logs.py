"""`perf-metrics plot`, `summary`, `compare` and `goodput`: curves and figures of runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..logs.compare import DIFFERENCE, KEYS, compare_logs, comparison_json, comparison_lines
from ..logs.goodput import (
    GOODPUT_FOLDER,
    goodput_as_json,
    goodput_as_text,
    mfu_of_run,
    plot_goodput,
    read_goodput,
)
from ..logs.log_file import LOG_FILENAME, STATE_FILENAME
from ..logs.plot import PANELS, plot_logs
from ..logs.summary import default_names, read_run, summary_json, summary_lines, summary_of
from . import price

if TYPE_CHECKING:
    from . import OneLineParser


def add_logs_argument(parser: argparse.ArgumentParser) -> None:
    """Add one or several LOG as `logs`."""
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help=f"{LOG_FILENAME}, {STATE_FILENAME} of Hugging Face's trainer, a directory that holds one of "
        "them, or a file with one JSON object a line",
    )


def fill_plot(parser: OneLineParser) -> None:
    """Add what `plot` takes."""
    names = ", ".join(panel.name for panel in PANELS)
    parser.description = "Draw the curves of one or several runs, and print the path of the picture."
    add_logs_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("training-curves.png"),
        metavar="FILE",
        help="picture, .png or .svg; an existing one is replaced [%(default)s]",
    )
    parser.add_argument(
        "--panels",
        type=_names,
        metavar="NAME,...",
        help=f"what to draw, from top to bottom: {names}; a key of the log entries, such as grad_norm; or "
        "several keys in one panel: grad_norm+grad_norm_max [the named ones that there are numbers for]",
    )
    parser.add_argument(
        "--x", choices=("step", "tokens"), default="step", help="the horizontal axis [%(default)s]"
    )
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the past in the moving average of the loss, 0 to below 1 [%(default)g]",
    )
    parser.add_argument(
        "--labels", type=_names, metavar="NAME,...", help="a name for each run [taken from the paths]"
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the picture")
    parser.set_defaults(run=_run_plot)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _run_plot(options: argparse.Namespace) -> int:
    path = plot_logs(
        options.logs,
        options.output,
        panels=options.panels,
        x=options.x,
        smooth=options.smooth,
        labels=options.labels,
        title=options.title,
    )
    print(path)
    return 0


def fill_summary(parser: OneLineParser) -> None:
    """Add what `summary` takes."""
    parser.description = (
        "Show the figures of runs, one a row; n/a: the log does not tell. Speed and utilization "
        "are medians over the log entries; OFU and MFU-OFU, where logged, are means over the time without "
        "warm-up, with their 95 % confidence intervals."
    )
    add_logs_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="write JSON, in tokens per second, seconds, bytes and shares"
    )
    parser.set_defaults(run=_run_summary)


def _run_summary(options: argparse.Namespace) -> int:
    names = default_names(options.logs)
    summaries = [summary_of(read_run(log), name) for log, name in zip(options.logs, names, strict=True)]
    if options.json:
        print(json.dumps([summary_json(summary) for summary in summaries], indent=2))
    else:
        print("\n".join(summary_lines(summaries)))
    return 0


def fill_compare(parser: OneLineParser) -> None:
    """Add what `compare` takes."""
    parser.description = (
        "Compare two runs, such as two settings: means over time without warm-up, which are the first log "
        "entry and the first after a resume or a pause; their 95 % confidence intervals; the difference with "
        "its own; and which is better, or how much longer to measure until a difference can be told."
    )
    logs = f"{LOG_FILENAME}, {STATE_FILENAME}, a directory with one of them, or JSON lines"
    parser.add_argument("first", type=Path, metavar="A", help=logs)
    parser.add_argument("second", type=Path, metavar="B", help="the same of the other run")
    parser.add_argument(
        "--keys",
        type=_names,
        metavar="NAME,...",
        help=f"keys of the log entries [those of {', '.join(KEYS)} that both have]",
    )
    parser.add_argument(
        "--difference",
        type=float,
        default=100 * DIFFERENCE,
        metavar="PERCENT",
        help="of A's figure: how long does it take to tell that? [%(default)g]",
    )
    parser.add_argument(
        "--skip-steps", type=int, default=0, metavar="N", help="first steps that do not count either [0]"
    )
    parser.add_argument("--json", action="store_true", help="write JSON, in units of the log and seconds")
    parser.set_defaults(run=_run_compare)


def _run_compare(options: argparse.Namespace) -> int:
    comparisons = compare_logs(
        options.first,
        options.second,
        keys=options.keys,
        difference=options.difference / 100,
        skip_steps=options.skip_steps,
    )
    if options.json:
        print(json.dumps([comparison_json(one) for one in comparisons], indent=2))
    else:
        print("\n".join(comparison_lines(comparisons)))
    return 0


def fill_goodput(parser: OneLineParser) -> None:
    """Add what `goodput` takes."""
    parser.description = (
        "Show what the device time of a run was spent on, over all of its sessions: steps in the model, "
        "steps lost to restarts, start-up, compilation, data, evaluation, saving, and between sessions."
    )
    parser.add_argument(
        "directory", type=Path, metavar="RUN", help=f"directory of a run, with a folder {GOODPUT_FOLDER}"
    )
    parser.add_argument("--price", type=price, metavar="X", help="of one device hour, to show costs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it as a picture too, .png or .svg")
    parser.add_argument("--json", action="store_true", help="write JSON, in seconds and shares")
    parser.set_defaults(run=_run_goodput)


def _run_goodput(options: argparse.Namespace) -> int:
    goodput = read_goodput(options.directory)
    mfu = mfu_of_run(options.directory)
    if options.plot is not None:
        plot_goodput(goodput, options.plot, title=str(options.directory))
    if options.json:
        print(json.dumps(goodput_as_json(goodput, mfu, options.price), indent=2))
        return 0
    print(goodput_as_text(goodput, mfu, options.price))
    if options.plot is not None:
        print(options.plot)
    return 0
