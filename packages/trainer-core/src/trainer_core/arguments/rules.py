"""The checks that argument classes are made of: values, and the types of fields."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError, Dataclass

Choice = TypeVar("Choice")


def at_least(setting: str, value: object, minimum: int) -> None:
    """Require a whole number that is not below `minimum`.

    Raises:
        ConfigurationError: If it is not an integer, or too small.
    """
    if not _is_int(value) or value < minimum:
        raise ConfigurationError(
            setting,
            value,
            f"must be a whole number of at least {minimum}",
            f"set {setting} to {minimum} or more",
        )


def at_least_or(setting: str, value: object, minimum: int, off: int) -> None:
    """Require a whole number of at least `minimum`, or the value `off` that switches the setting off.

    Raises:
        ConfigurationError: If it is neither.
    """
    if value != off:
        at_least(setting, value, minimum)


def within(setting: str, value: object, low: float, high: float) -> None:
    """Require a number from `low` to `high`, both included.

    Raises:
        ConfigurationError: If it is not a number, or out of range.
    """
    if not is_number(value) or not low <= value <= high:
        raise ConfigurationError(
            setting, value, f"must be a number from {low:g} to {high:g}", "choose a value in that range"
        )


def one_of(setting: str, value: object, allowed: Collection[Choice]) -> Choice:
    """Require one of a few values, and return the one that it is.

    Raises:
        ConfigurationError: If it is none of them.
    """
    for choice in allowed:
        if value == choice:
            return choice
    names = ", ".join(repr(choice) for choice in allowed)
    raise ConfigurationError(setting, value, f"must be one of {names}", "choose one of these")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or float; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_HINTS: dict[type, dict[str, Any]] = {}
"""By class, as evaluating them takes longer than all checks."""


def check_types(args: Dataclass) -> None:
    """Refuse a value of another type than its field, which might be taken for true, or walked by letter.

    A whole number serves as a float, a list as a tuple. Nested argument classes check themselves.

    Raises:
        ConfigurationError: For the first such value.
    """
    hints = _hints(type(args))
    for field in fields(args):
        value = getattr(args, field.name)
        if not _fits(value, hints[field.name]):
            raise ConfigurationError(
                field.name,
                value,
                f"must be {_shown(hints[field.name])}, got {type(value).__name__}",
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
