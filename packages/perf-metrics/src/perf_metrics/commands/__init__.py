"""The command `perf-metrics`, and the parser that its subcommands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich_argparse import RichHelpFormatter


class _Help(RichHelpFormatter):
    text_markup = help_markup = False  # square brackets are text


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong, with exit status 2.

    Args:
        fill: Adds the arguments when they are needed, so that a command imports nothing for the others.
        options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, fill: Callable[[OneLineParser], None] | None = None, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})
        self._fill = fill

    def parse_known_args(  # type: ignore[override]  # not all of argparse's overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, once the arguments are there."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"{self.prog}: {message}. See --help.\n")


def price(text: str) -> float:
    """Return a price that was given as text.

    Raises:
        argparse.ArgumentTypeError: It is not a number, or is below 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price: give a number, 0 or more.")
    return value
