"""Plain-text rendering of the progress table: aligned rows, a header now and then, a closing summary."""

from __future__ import annotations

from collections.abc import Mapping

from .columns import ColumnSpec


class ProgressTable:
    """Renders log records as aligned lines.

    Only columns whose key is in the record appear. Text is right-aligned and never cut: a cell wider than its
    column widens it from there on, under a new header.

    Args:
        columns: Columns by name, in the order of display.
        header_interval: Rows between two headers.
    """

    def __init__(self, columns: Mapping[str, ColumnSpec], header_interval: int) -> None:
        self._columns = dict(columns)
        self._header_interval = header_interval
        self._widths = {
            name: max(spec.width, len(spec.label or spec.key)) for name, spec in self._columns.items()
        }
        self._shown: list[str] = []
        self._rows_since_header = 0

    def reserve(self, name: str, width: int) -> None:
        """Make a column at least `width` wide from its first row on; unknown names are ignored."""
        if name in self._widths:
            self._widths[name] = max(self._widths[name], width)

    def row(self, record: Mapping[str, object]) -> list[str]:
        """Return the lines for one record: the row, and a header before it where one is due."""
        shown = [name for name, spec in self._columns.items() if spec.key in record]
        cells = {name: self._columns[name].text(record[self._columns[name].key]) for name in shown}
        wider = {name: len(text) for name, text in cells.items() if len(text) > self._widths[name]}
        self._widths.update(wider)
        lines = []
        if wider or shown != self._shown or self._rows_since_header >= self._header_interval:
            labels = {name: self._columns[name].label or self._columns[name].key for name in shown}
            lines.append(self._line(labels))
            self._shown, self._rows_since_header = shown, 0
        self._rows_since_header += 1
        return [*lines, self._line(cells)]

    def note(self, record: Mapping[str, object], text: str) -> str:
        """Return a line of free text, with the step in its column where the table shows steps."""
        step = self._columns.get("step")
        if step is None or step.key not in record:
            return text
        return f"{step.text(record[step.key]).rjust(self._widths['step'])} {text}"

    def _line(self, cells: Mapping[str, str]) -> str:
        return " ".join(text.rjust(self._widths[name]) for name, text in cells.items())


def render_summary(title: str, columns: Mapping[str, ColumnSpec], record: Mapping[str, object]) -> list[str]:
    """Return the lines of a two-column block: labels on the left, values right-aligned."""
    rows = [
        (spec.label or spec.key, spec.text(record[spec.key]))
        for spec in columns.values()
        if spec.key in record
    ]
    left = max((len(label) for label, _ in rows), default=0)
    right = max((len(text) for _, text in rows), default=0)
    return [title, *(f"  {label.ljust(left)}  {text.rjust(right)}" for label, text in rows)]
