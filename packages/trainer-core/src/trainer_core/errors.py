"""Errors a user can cause and mend, and the one for a setting that would have no effect."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, NamedTuple, Protocol


class ConfigurationError(ValueError):
    """A setting that cannot be used, with the rule it breaks and the way out, as whole sentences.

    "max_steps=0 must be at least 1. Set it to 1 or more."

    Args:
        setting: Name of the setting, with dots for nested ones.
        value: What it was set to.
        rule: What is said of the setting: "must be at least 1".
        fix: What to do about it, beginning in lower case: "set it to 1 or more".

    Attributes:
        may_pass: Whether the same setting may be usable later: a rank could not reach what it names.
    """

    may_pass = False

    def __init__(self, setting: str, value: object, rule: str, fix: str) -> None:
        super().__init__(f"{setting}={value!r} {stopped(rule)} {_sentence(fix)}")
        self.setting = setting
        self.value = value
        self.rule = rule
        self.fix = fix


def _sentence(text: str) -> str:
    """A text with its full stop, and with a capital unless it begins with a name or with code."""
    first = text.split(" ", 1)[0].rstrip(",:;.?")
    return stopped(text[0].upper() + text[1:] if first.isalpha() and first.islower() else text)


def stopped(text: str) -> str:
    """A text with the full stop that it may lack."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


class DataError(ValueError):
    """Data that cannot be trained on or evaluated, with the reason."""


class Dataclass(Protocol):
    """An object of a dataclass, such as the arguments of a run."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Dependent(NamedTuple):
    """A setting that does something only under a condition."""

    name: str
    condition: str
    """When it has no effect, in words."""
    fix: str
    """What to set to give it one."""


def refuse_without_effect(args: object, dependents: Iterable[Dependent]) -> None:
    """Refuse settings that were changed from their default and have no effect.

    Args:
        args: An argument dataclass.
        dependents: Settings whose condition is not met.

    Raises:
        ConfigurationError: Naming the first of them.
    """
    for name, condition, fix in dependents:
        value = getattr(args, name)
        if value != default_of(args, name):
            raise ConfigurationError(name, value, f"has no effect {condition}", f"{fix}, or leave {name} out")


def unused_settings(args: Dataclass, dependents: Iterable[Dependent]) -> list[str]:
    """Say which settings were changed and rest now, because what they belong to is off.

    These are periods and limits: harmless, but somebody may have meant to switch something on.

    Args:
        args: An argument dataclass.
        dependents: Settings whose condition is not met.

    Returns:
        Two sentences for each.
    """
    defaults = {field.name: field.default for field in fields(args)}
    return [
        f"{name}={getattr(args, name)!r} has no effect {condition}. "
        + _sentence(f"{fix}, or leave {name} out")
        for name, condition, fix in dependents
        if getattr(args, name) != defaults[name]
    ]


def default_of(args: object, name: str) -> object:
    """The default of a field in the class that first declared it; subclasses may have other defaults."""
    for cls in reversed(type(args).__mro__):
        if name in inspect.get_annotations(cls):
            field = next(f for f in fields(cls) if f.name == name)
            factory = field.default_factory
            return field.default if factory is MISSING else factory()
    raise AttributeError(f"{type(args).__name__} has no field {name}")
