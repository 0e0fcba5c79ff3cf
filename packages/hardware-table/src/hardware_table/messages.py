"""Warnings of this package, each said once per process."""

from __future__ import annotations

import warnings

_said: set[str] = set()


class HardwareTableWarning(UserWarning):
    """A peak is unknown or uncertain, or what was detected could not be written down."""


def warn_once(message: str) -> None:
    """Warn with `HardwareTableWarning`, unless this process has said the same before."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, HardwareTableWarning, stacklevel=3)
