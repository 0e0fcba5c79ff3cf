"""The columns of the progress table: what each one shows, and how overrides are merged."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from .format import Format, Reduce, check_format, check_reduce, format_checked


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
            raise ValueError(f"width={self.width!r}: must be a positive number of characters")
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
                raise ValueError(f"column {name!r} is None, but no such column exists{_hint(name, merged)}")
        elif isinstance(override, ColumnSpec):
            merged[name] = override
        else:
            merged[name] = _lay_over(name, merged.get(name, ColumnSpec()), override)
    return {name: dataclasses.replace(spec, key=spec.key or name) for name, spec in merged.items()}


def _lay_over(name: str, default: ColumnSpec, override: ColumnOverride) -> ColumnSpec:
    fields = {field.name: None for field in dataclasses.fields(ColumnSpec)}
    for field in override:
        if field not in fields:
            raise ValueError(f"column {name!r} has no field {field!r}{_hint(field, fields)}")
    try:
        return dataclasses.replace(default, **override)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None


def _hint(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
