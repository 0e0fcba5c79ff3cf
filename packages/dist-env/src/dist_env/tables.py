"""Plain text: tables, and ranks by their numbers."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> str:
    """Columns as wide as their widest cell, two spaces apart.

    Args:
        header: One name per column.
        rows: Cells; None shows as `-`.
        right: Indices of the columns to align right.
    """
    cells = [list(header)] + [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in cells)


def name_ranks(ranks: Sequence[int], total: int) -> str:
    """`all ranks`, `rank 3`, or `ranks 0-2, 5`."""
    if len(ranks) == total:
        return "all ranks" if total > 1 else f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
