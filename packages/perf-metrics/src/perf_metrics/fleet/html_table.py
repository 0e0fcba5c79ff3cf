"""A table of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Cell:
    """A cell: its text, what it is sorted by where that is not the text, and its classes."""

    text: str
    value: float | None = None
    css: str = ""


def text_cell(text: str) -> Cell:
    """Return a cell with text on the left."""
    return Cell(text, css="text")


def number_cell(value: float | None, fmt: str) -> Cell:
    """Return a cell with a number."""
    return Cell("", float("nan")) if value is None else Cell(format(value, fmt), value)


def share_cell(value: float | None) -> Cell:
    """Return a cell with a share in percent."""
    return number_cell(None if value is None else 100 * value, ".1f")


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], *, ids: Sequence[str] = (), sortable: bool = False
) -> str:
    """Return a table as HTML.

    Args:
        header: Names of the columns.
        rows: As many cells each.
        ids: Of the rows; none where empty.
        sortable: Whether the names are buttons for the page's script.
    """
    heads = "".join(
        _head(name, rows[0][index].css if rows else "", sortable) for index, name in enumerate(header)
    )
    names = [f' id="{escape(name)}"' for name in ids] or [""] * len(rows)
    body = "\n".join(
        f"<tr{name}>{''.join(map(_cell, row))}</tr>" for name, row in zip(names, rows, strict=True)
    )
    kind = ' class="sortable"' if sortable else ""
    return f"<table{kind}>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _head(name: str, css: str, sortable: bool) -> str:
    text = f'<button type="button">{escape(name)}</button>' if sortable else escape(name)
    return f"<th{_class(css)}>{text}</th>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f"<td{_class(cell.css)}{value}>{escape(cell.text)}</td>"


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""
