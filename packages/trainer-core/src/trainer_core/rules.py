"""The checks that argument classes are made of; each names setting, value, rule and fix."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

from .errors import ConfigurationError


def at_least(setting: str, value: object, minimum: int) -> None:
    """Require a whole number that is not below `minimum`.

    Raises:
        ConfigurationError: If it is no whole number or too small.
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
        ConfigurationError: If it is no number or outside.
    """
    if not is_number(value) or not low <= value <= high:
        raise ConfigurationError(
            setting, value, f"must be a number from {low:g} to {high:g}", "choose a value in that range"
        )


def one_of(setting: str, value: object, allowed: Collection[object]) -> None:
    """Require one of a few values.

    Raises:
        ConfigurationError: If it is none of them.
    """
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed)
        raise ConfigurationError(setting, value, f"must be one of {names}", "choose one of these")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int or float; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
