"""Errors a user can cause and mend."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A setting that cannot be used, with the rule it breaks and the way out.

    Args:
        setting: Name of the setting, with dots for nested ones.
        value: What it was set to.
        rule: The rule that it breaks, in words.
        fix: What to do about it.
    """

    def __init__(self, setting: str, value: object, rule: str, fix: str) -> None:
        super().__init__(f"{setting}={value!r}: {rule}; {fix}")
        self.setting = setting
        self.value = value
        self.rule = rule
        self.fix = fix


class DataError(ValueError):
    """Data that cannot be trained on or evaluated, with the reason."""
