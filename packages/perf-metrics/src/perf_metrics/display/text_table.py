"""A table of texts with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return lines with columns of equal width, two spaces apart.

    Args:
        header: Names of the columns.
        rows: As many texts each.
        left: Columns that are aligned on the left; the others on the right.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_line(row, widths, left) for row in (header, *rows))


def _line(texts: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = (
        text.ljust(width) if index in left else text.rjust(width)
        for index, (text, width) in enumerate(zip(texts, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
