"""Tells early that an optional library is missing."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import ConfigurationError


def require_library(callback: str, library: str) -> None:
    """Check that an optional library is installed, without importing it; its extra has the same name.

    Raises:
        ConfigurationError: It is not installed.
    """
    if find_spec(library) is None:
        raise ConfigurationError(
            "callbacks",
            callback,
            f"needs the library {library}, which is not installed",
            f"pip install 'trainer-core[{library}]', or leave the callback out",
        )
