"""What commands print and write: tables, text that a terminal can take, and whether a file can be written."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from trainer_core import ConfigurationError


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
