"""Text for people: tables, sizes, ages, and a progress line."""

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

_NARROWEST = 10
_GAP = "  "
_QUIET_SECONDS = 0.5
_REFRESH_SECONDS = 0.1
_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_AGES = (("d", 86400), ("h", 3600), ("min", 60))


def printable(text: str) -> str:
    """Text from a file, safe to show: control characters appear as escapes.

    Args:
        text: Any text.

    Returns:
        The text on one line, without anything that a terminal would obey.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size_text(size: int) -> str:
    """Bytes with a unit, a power of 1000."""
    for unit, factor in _UNITS:
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def age_text(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def number_text(value: float) -> str:
    """An integer in full, any other number with six significant digits."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def terminal_width() -> int | None:
    """Columns of the terminal, or None when the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under a header. On a terminal, cells wrap so that lines fit; elsewhere nothing wraps.

    Args:
        header: Names of the columns.
        rows: The cells, one sequence a row, as long as the header.
    """
    for line in table_lines(header, rows, terminal_width()):
        print(line)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of a table.

    Args:
        header: Names of the columns.
        rows: The cells.
        width: Columns to fit into; None for as wide as needed. Columns stay at least 10 wide.

    Returns:
        The lines, without blanks at the end.
    """
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        widths = _fit(widths, width)
    lines = []
    for row in cells:
        wrapped = [
            textwrap.wrap(cell, w) if len(cell) > w else [cell] for cell, w in zip(row, widths, strict=True)
        ]
        for index in range(max(map(len, wrapped))):
            parts = [piece[index] if index < len(piece) else "" for piece in wrapped]
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append(_GAP.join(padded).rstrip())
    return lines


def _fit(widths: Sequence[int], width: int) -> list[int]:
    fitted = list(widths)
    room = width - len(_GAP) * (len(fitted) - 1)
    while sum(fitted) > room and max(fitted) > _NARROWEST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


class Progress(AbstractContextManager["Progress"]):
    """A line on the terminal that says how much of a long read is done.

    It appears after half a second, on standard error when that is a terminal, and vanishes at the end.

    Args:
        what: What is being done.
        total: Bytes in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._shown = 0
        self._due = time.monotonic() + _QUIET_SECONDS

    def advance(self, count: int) -> None:
        """Count work that is done.

        Args:
            count: Bytes since the last call.
        """
        self._done += count

    def show(self, name: str) -> None:
        """Say how far the work has come.

        Args:
            name: What comes next.
        """
        now = time.monotonic()
        if now < self._due or not sys.stderr.isatty():
            return
        self._due = now + _REFRESH_SECONDS
        share = self._done / self._total if self._total else 1.0
        line = f"{self._what}: {share:4.0%} of {size_text(self._total)}, {printable(name)}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._shown))
        sys.stderr.flush()
        self._shown = len(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe the line."""
        if self._shown:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()
