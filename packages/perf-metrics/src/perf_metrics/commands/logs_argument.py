"""The argument that every subcommand about logs has."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..logs.formats import LOG_FILENAME, STATE_FILENAME


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
