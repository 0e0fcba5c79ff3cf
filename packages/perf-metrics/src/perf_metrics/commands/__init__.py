"""The command `perf-metrics`, and the parser that its subcommands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn, TypeAlias

if TYPE_CHECKING:
    Subparsers: TypeAlias = argparse._SubParsersAction["OneLineParser"]
    """Where a subcommand adds itself; argparse has no public name for it."""


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what is wrong, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")
