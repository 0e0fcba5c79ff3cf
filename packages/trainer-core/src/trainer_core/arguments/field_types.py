"""Whether the values of an argument object have the types of its fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError

_HINTS: dict[type, dict[str, Any]] = {}
"""By class, as evaluating them takes longer than all checks."""


def check_types(args: object) -> None:
    """Refuse a value of another type than its field, which might be taken for true, or walked by letter.

    A whole number serves as a float, a list as a tuple. Nested argument classes check themselves.

    Raises:
        ConfigurationError: For the first such value.
    """
    hints = _hints(type(args))
    for field in fields(args):  # type: ignore[arg-type]
        value = getattr(args, field.name)
        if not _fits(value, hints[field.name]):
            raise ConfigurationError(
                field.name,
                value,
                f"has the type {type(value).__name__} and must be {_shown(hints[field.name])}",
                "give a value of that type",
            )


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if origin is dict:
        of_value = get_args(hint)[1]
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and _fits(item, of_value) for key, item in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
