"""What the command lines of several packages share. It imports no torch: help comes at once."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import NoReturn

from rich_argparse import RawDescriptionRichHelpFormatter

_BROKEN_PIPE = 141
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1} | {
    f"{letter}{more}": base**power
    for power, letter in enumerate("KMGT", 1)
    for more, base in (("B", 1000), ("IB", 1024))
}


class HelpFormatter(RawDescriptionRichHelpFormatter):
    """Help in colours, in which square brackets are text."""

    text_markup = help_markup = False


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Imported here: it takes longer than all the rest of a help text.
        from importlib.metadata import version

        print(f"{self.const} {version(str(self.const))}")
        parser.exit()


def add_version(parser: argparse.ArgumentParser, distribution: str) -> None:
    """Let a command have ``--version``, that of a distribution."""
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        const=distribution,
        default=argparse.SUPPRESS,
        help="show the version and exit",
    )


def parse_size(text: str) -> int:
    """A size such as ``5GB``, ``500 MiB`` or ``1000000``.

    Args:
        text: A number, and a unit: KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024) or
            none.

    Returns:
        Bytes, at least 1.

    Raises:
        argparse.ArgumentTypeError: The text cannot be read as a size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of 1 byte or more, such as 5GB or 500MiB")
    return size


def size_text(size: float) -> str:
    """Bytes with a unit, a power of 1000."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def printable(text: str) -> str:
    """Text from outside on one line, safe to show: what a terminal would obey appears as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def leave_broken_pipe() -> int:
    """Let the interpreter end quietly though the reader of standard output is gone; returns the exit code."""
    # It flushes once more at its end, which must not complain either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _BROKEN_PIPE
