"""Turning the values of a log record into text."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Literal, TypeAlias, cast

Format: TypeAlias = str | Callable[[float], str]
Reduce: TypeAlias = Literal["max", "min", "mean", "sum", "all"] | Callable[[list[float]], float] | None

_INTEGER_TYPES = "bdoxX"
_SI_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_MISSING = "n/a"


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
    elements = cast("list[float]", [element for element in value if element is not None])
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
            f'fmt={fmt!r} is not a format for numbers ({error}); use a Python format spec such as ".3f", '
            '"si", "gib" or a callable'
        ) from None


def check_reduce(reduce: Reduce) -> None:
    """Raise ValueError unless `reduce` is a reduction that `format_value` knows."""
    if reduce is not None and not callable(reduce) and reduce not in (*_REDUCTIONS, "all"):
        raise ValueError(
            f'reduce={reduce!r}: must be one of {", ".join(_REDUCTIONS)}, "all", None or a callable'
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
