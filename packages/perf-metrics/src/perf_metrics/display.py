"""Formats numbers, columns and tables as text."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from numbers import Real
from typing import Literal, TypeAlias, TypedDict, cast

Format: TypeAlias = str | Callable[[float], str]
Reduce: TypeAlias = Literal["max", "min", "mean", "sum", "all"] | Callable[[list[float]], float] | None

_INTEGER_TYPES = "bdoxX"
_SI_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_MISSING = "n/a"
_WIDEST = 10_000


def _extreme(of: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    """Let one nan make the whole nan, as it does a mean; max and min alone go by its place in the list."""
    return lambda values: next((value for value in values if value != value), of(values))


_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": _extreme(max),
    "min": _extreme(min),
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
}


def format_value(value: object, fmt: Format = "", reduce: Reduce = None) -> str:
    """Return the text that the progress table shows for a value.

    Args:
        value: A scalar, or a list or tuple of scalars (one per rank). None, the null of a log file, means
            that there is no value: it is shown as "n/a", and left out of a reduction.
        fmt: A Python format spec (integer types cut the fraction off first); "si" for K, M, G, ... with two
            decimals; "gib" for bytes in GiB with three; a callable from the value to text; or empty: four
            significant digits for floats, thousands separators for integers. Formats other than a callable
            are for numbers: anything else is shown by `str`, and nan and infinities by their names.
        reduce: What to do with a list: None or "max", "min", "mean", "sum"; "all" formats each element and
            joins them by "/"; a callable takes the list and its result is formatted. A scalar is left as it
            is, except that a callable gets it as a list of one. A list without a value gives "n/a".

    Raises:
        ValueError: `fmt` or `reduce` is not one of the above.
    """
    check_format(fmt)
    check_reduce(reduce)
    return format_checked(value, fmt, reduce)


def format_checked(value: object, fmt: Format, reduce: Reduce) -> str:
    """`format_value` for a format and a reduction that have been checked before."""
    if value is None:
        return _MISSING
    if not isinstance(value, list | tuple):
        alone = reduce([cast("float", value)]) if callable(reduce) else value
        return _format_scalar(alone, fmt)
    elements = [element for element in value if element is not None]
    if not elements:
        return _MISSING
    if reduce == "all":
        return "/".join(_MISSING if element is None else _format_scalar(element, fmt) for element in value)
    reducer = reduce if callable(reduce) else _REDUCTIONS[reduce or "max"]
    return _format_scalar(reducer(elements), fmt)


def check_format(fmt: Format) -> None:
    """Raise ValueError unless `fmt` is a format that `format_value` knows."""
    if callable(fmt) or fmt in ("", "si", "gib"):
        return
    try:
        format(1 if fmt[-1:] in _INTEGER_TYPES else 1.0, fmt)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f'fmt={fmt!r} is not a format for numbers ({error}). Use a Python format spec such as ".3f", '
            '"si", "gib" or a callable.'
        ) from None


def check_reduce(reduce: Reduce) -> None:
    """Raise ValueError unless `reduce` is a reduction that `format_value` knows."""
    if reduce is not None and not callable(reduce) and reduce not in (*_REDUCTIONS, "all"):
        raise ValueError(
            f'reduce={reduce!r} must be one of {", ".join(_REDUCTIONS)}, "all", None or a callable.'
        )


def _format_scalar(value: object, fmt: Format) -> str:
    if callable(fmt):
        return fmt(value)  # type: ignore[arg-type]  # the user's callable knows what its column holds
    # Plain ones first: to ask whether it is one of all kinds of real numbers takes longer than to format it.
    if isinstance(value, bool) or not isinstance(value, float | int | Real):
        return str(value)
    if isinstance(value, int) and not fmt:
        return f"{value:,}"
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    if fmt == "si":
        return _format_si(number)
    if fmt == "gib":
        return f"{number / 2**30:.3f} GiB"
    if fmt[-1:] in _INTEGER_TYPES and fmt:
        return format(value if isinstance(value, int) else int(number), fmt)
    return format(number, fmt or ".4g")


def _format_si(number: float) -> str:
    for prefix in _SI_PREFIXES:
        # Compared after rounding: 999,999 is 1.00M, not 1000.00K.
        if round(abs(number), 2) < 1000 or prefix == _SI_PREFIXES[-1]:
            break
        number /= 1000
    if not prefix and 0 < abs(number) < 0.01:
        return f"{number:.1e}"
    return f"{number:.2f}{prefix}"


@dataclass(frozen=True)
class ColumnSpec:
    """One column of the progress table.

    Attributes:
        key: Key in the log record. Empty: the column's own name.
        label: Header. Empty: the key.
        width: Width in characters; longer text is shown whole and widens the column.
        fmt: Format of one value, as in `format_value`.
        reduce: What to do with a list, as in `format_value`.
        missing: Text where the record has the key with the value None.

    Raises:
        ValueError: `width`, `fmt` or `reduce` is out of range.
    """

    key: str = ""
    label: str = ""
    width: int = 10
    fmt: Format = ""
    reduce: Reduce = None
    missing: str = "n/a"

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"width={self.width!r} must be a positive number of characters.")
        check_format(self.fmt)
        check_reduce(self.reduce)

    def text(self, value: object) -> str:
        """Return what the column shows for a value of the record, before padding."""
        return self.missing if value is None else format_checked(value, self.fmt, self.reduce)


class ColumnOverride(TypedDict, total=False):
    """Some fields of a `ColumnSpec`; the others keep their defaults."""

    key: str
    label: str
    width: int
    fmt: Format
    reduce: Reduce
    missing: str


ColumnOverrides: TypeAlias = Mapping[str, ColumnOverride | ColumnSpec | None]

STEP_COLUMNS: Mapping[str, ColumnSpec] = {
    "step": ColumnSpec("step", width=6),
    "epoch": ColumnSpec("epoch", width=6, fmt=".2f"),
    "loss": ColumnSpec("loss", width=10, fmt=".5f"),
    "learning_rate": ColumnSpec("learning_rate", width=13, fmt=".2e"),
    "grad_norm": ColumnSpec("grad_norm", width=10, fmt=".3f"),
    "tok_per_sec": ColumnSpec("tok_per_sec", width=12, fmt="si"),
    "mfu": ColumnSpec("mfu", width=7, fmt=".1%", missing="peak unknown"),
    "ofu": ColumnSpec("ofu", width=7, fmt=".1%", missing="unavailable"),
    "peak_mem": ColumnSpec("peak_mem", width=11, fmt="gib", reduce="max"),
}

FINAL_METRICS: Mapping[str, ColumnSpec] = {
    "train_runtime": ColumnSpec("train_runtime", label="runtime (s)", fmt=",.1f"),
    "train_loss": ColumnSpec("train_loss", label="mean loss", fmt=".5f"),
    "train_samples_per_second": ColumnSpec("train_samples_per_second", label="samples/s", fmt=",.3f"),
    "train_steps_per_second": ColumnSpec("train_steps_per_second", label="steps/s", fmt=",.3f"),
    "tokens_per_second": ColumnSpec("tokens_per_second", label="tokens/s", fmt="si"),
    "flops_per_second": ColumnSpec("flops_per_second", label="model FLOP/s", fmt="si"),
    "mfu": ColumnSpec("mfu", label="MFU", fmt=".1%", missing="peak unknown"),
    "total_tokens": ColumnSpec("total_tokens", label="total tokens", fmt="si"),
    "total_flops": ColumnSpec("total_flops", label="total model FLOPs", fmt="si"),
    "epoch": ColumnSpec("epoch", label="epoch", fmt=".2f"),
}


def merge_columns(
    defaults: Mapping[str, ColumnSpec], overrides: ColumnOverrides | None
) -> dict[str, ColumnSpec]:
    """Lay overrides over default columns.

    Args:
        defaults: Columns by name, in the order of display.
        overrides: By name: some fields, laid over the default of that name; a whole `ColumnSpec`, in its
            place; or None, which removes it. New names are appended in their order.

    Returns:
        The columns in the order of display, each with its key filled in.

    Raises:
        ValueError: An override has an unknown field, removes a column that is not there, or a bad value.
    """
    merged = dict(defaults)
    for name, override in (overrides or {}).items():
        if override is None:
            if merged.pop(name, None) is None:
                raise ValueError(f"column {name!r} is None, but no such column exists.{hint(name, merged)}")
        elif isinstance(override, ColumnSpec):
            merged[name] = override
        else:
            merged[name] = _lay_over(name, merged.get(name, ColumnSpec()), override)
    return {name: dataclasses.replace(spec, key=spec.key or name) for name, spec in merged.items()}


def _lay_over(name: str, default: ColumnSpec, override: ColumnOverride) -> ColumnSpec:
    fields = {field.name: None for field in dataclasses.fields(ColumnSpec)}
    for field in override:
        if field not in fields:
            raise ValueError(f"column {name!r} has no field {field!r}.{hint(field, fields)}")
    try:
        return dataclasses.replace(default, **override)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None


def hint(word: str, known: Collection[str]) -> str:
    """Return the likely name for a misspelt one, or else all names, as a sentence to add to a message."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known are {', '.join(known)}."


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


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return lines with columns of equal width, two spaces apart.

    Args:
        header: Names of the columns.
        rows: As many texts each.
        left: Columns that are aligned on the left; the others on the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(Text(name), justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # Rows stay on one line, however long: they are read by programs, too.
    text = StringIO()
    Console(file=text, width=_WIDEST, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
