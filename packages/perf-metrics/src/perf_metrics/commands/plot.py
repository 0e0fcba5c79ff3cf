"""`perf-metrics plot`: curves of one or several runs as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..logs.panels import PANELS
from ..logs.plot import plot_logs
from .logs_argument import add_logs_argument

if TYPE_CHECKING:
    from .parser import Subparsers


def add_plot(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    names = ", ".join(panel.name for panel in PANELS)
    parser = subparsers.add_parser(
        "plot",
        help="draw loss, speed, utilization, memory and learning rate of runs",
        description="Draw the curves of one or several runs, and print the path of the picture.",
    )
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
    parser.set_defaults(run=_run)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _run(options: argparse.Namespace) -> int:
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
