"""Text for people: tables, sizes, ages, and a progress line."""

import io
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import rich.progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 100_000
_QUIET_SECONDS = 0.5
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


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under a header. On a terminal, cells wrap so that lines fit; elsewhere nothing wraps."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(header, rows, width):
        print(line)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of a table, without blanks at the end.

    Args:
        header: Names of the columns.
        rows: The cells.
        width: Columns to fit into; None for as wide as needed.
    """
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    text = io.StringIO()
    Console(file=text, width=width or _WIDEST, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


class Progress(AbstractContextManager["Progress"]):
    """A line on the terminal that says how much of a long read is done.

    It appears after half a second, on standard error when that is a terminal, and vanishes at the end.

    Args:
        what: What is being done.
        total: Bytes in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._due = time.monotonic() + _QUIET_SECONDS
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.TaskProgressColumn(),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._what = what
        self._task = self._bar.add_task(what, total=total)

    def advance(self, count: int) -> None:
        """Count work that is done.

        Args:
            count: Bytes since the last call.
        """
        self._bar.advance(self._task, count)

    def show(self, name: str) -> None:
        """Say how far the work has come.

        Args:
            name: What comes next.
        """
        if time.monotonic() < self._due or not self._bar.console.is_terminal:
            return
        self._bar.start()
        self._bar.update(self._task, description=f"{self._what}, {printable(name)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wipe the line."""
        if self._bar.live.is_started:
            self._bar.stop()
