"""What the commands print, and the codes that they exit with."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

from trainer_core import ConfigurationError

PROG = "llama-pretrain"
EXIT_ABORTED = 1
EXIT_USER_ERROR = 2
EXIT_RESUMABLE = 75
"""As in `trainer_core`, which imports torch."""
EXIT_INTERRUPTED = 130


class BrokenRunError(RuntimeError):
    """A run that had begun could not continue, as on a full disk: other input would not change that."""


def exit_code_of(error: Exception) -> int | None:
    """The exit code of an error that is told in one line; None for any other, which is a mistake of ours.

    Of the errors that another process of the job has caused, `is_of_another_rank` tells.
    """
    from dist_env import may_pass
    from trainer_core import ConfigurationError

    if isinstance(error, ConfigurationError):  # before anything that imports torch for it
        return EXIT_ABORTED if may_pass(error) else EXIT_USER_ERROR
    from checkpoint_core import CheckpointError, LeaseLostError
    from dataloader_dispatch import DataError
    from dist_env import DistributedEnvironmentError
    from trainer_core import DataError as TrainerDataError

    if is_of_another_rank(error) or isinstance(error, BrokenRunError | LeaseLostError):
        return EXIT_ABORTED
    if isinstance(
        error, DataError | TrainerDataError | CheckpointError | DistributedEnvironmentError | OSError
    ):
        return EXIT_ABORTED if may_pass(error) else EXIT_USER_ERROR
    return None


def is_of_another_rank(error: Exception) -> bool:
    """Whether another process of the job is why this one cannot continue."""
    from checkpoint_core import LostRankError
    from dist_env import RankFailedError, RankTimeoutError

    return isinstance(error, RankFailedError | RankTimeoutError | LostRankError)


WITHOUT_FRESH_START = " without its fresh start (--fresh, or resume_from_checkpoint: false in a file)"
"""How a command that began anew is to be changed to continue."""
CONFIG_NAME = "config.yaml"
LOGS_NAME = "trainer_logs.json"
SESSIONS_NAME = "sessions.json"
"""Files of a run's directory that several commands read."""


def table(rows: Sequence[Sequence[str]], *, right: Collection[int], line: bool = False) -> list[str]:
    """Lines with aligned columns.

    Args:
        rows: Cells, the first row being the head.
        right: Columns that are aligned on the right, as numbers are.
        line: Whether to draw one below the head.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    ruler = [tuple("-" * width for width in widths)] if line else []
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (rows[0], *ruler, *rows[1:])
    ]


def text_plot(
    line: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]] = (),
    *,
    width: int = 60,
    height: int = 10,
) -> list[str]:
    """Lines that draw a curve in characters: `*` for the line, `o` for points.

    Args:
        line: (x, y) with rising x; those that are not finite are left out.
        points: Others on the same axes.
        width: Columns between the axes.
        height: Rows.

    Returns:
        The lines; none where there are fewer than two points to join.
    """
    line = [each for each in line if math.isfinite(each[1])]
    points = [each for each in points if math.isfinite(each[1])]
    if len(line) < 2:
        return []
    xs, ys = zip(*line, *points, strict=True)
    left, right, low, high = float(min(xs)), float(max(xs)), float(min(ys)), float(max(ys))
    cells = [[" "] * width for _ in range(height)]

    def column(x: float) -> int:
        return round((x - left) / ((right - left) or 1) * (width - 1))

    def draw(at: int, y: float, mark: str) -> None:
        cells[round((high - y) / ((high - low) or 1) * (height - 1))][at] = mark

    for (x, y), (next_x, next_y) in pairwise(line):
        first, last = column(x), column(next_x)
        for at in range(first, last + 1):
            draw(at, y + (next_y - y) * (at - first) / ((last - first) or 1), "*")
    for x, y in points:
        draw(column(x), y, "o")
    names = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    wide = max(map(len, names.values()))
    rows = [f"{names.get(row, ''):>{wide}} |{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    ends = f"{left:g}", f"{right:g}"
    below = ends[0] + ends[1].rjust(width - len(ends[0]))
    return [*rows, f"{'':>{wide}} +{'-' * width}", f"{'':>{wide}}  {below}"]


def wrapped(text: str, *, width: int = 76, indent: str = "    ") -> str:
    """A text with no line longer than `width`, indented; the spaces at the beginning of its lines stay."""
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line.expandtabs(4), width, drop_whitespace=False) or [""]
    ]
    return "\n".join(f"{indent}{line}" if line.strip() else "" for line in lines)


def printable(text: str) -> str:
    """Return a text with escapes such as `\\x1b` for all that would steer a terminal; lines and tabs stay.

    A model of bytes writes control characters, too.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def check_writable(setting: str, value: str | None) -> None:
    """Refuse a file that could not be written, before a command works for minutes.

    Args:
        setting: The setting that names it.
        value: Its path; None is not a file.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if value is None:
        return
    path, folder = Path(value), Path(value).parent
    if not value or path.is_dir():
        raise ConfigurationError(setting, value, "is a directory, or empty", "name a file")
    if not folder.is_dir():
        raise ConfigurationError(
            setting, value, f"is in {folder}, which is not a directory", "create the directory first"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(
            setting, value, "cannot be written", "name another file, or change its permissions"
        )
