"""Files that a command is to write: whether it can, before it works for minutes."""

from __future__ import annotations

import os
from pathlib import Path

from trainer_core import ConfigurationError


def check_writable(setting: str, value: str | None) -> None:
    """Refuse a file that could not be written.

    Args:
        setting: The setting that names it.
        value: Its path; None is no file.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if value is None:
        return
    path, folder = Path(value), Path(value).parent
    if not value or path.is_dir():
        raise ConfigurationError(setting, value, "is a directory, or nothing", "name a file")
    if not folder.is_dir():
        raise ConfigurationError(setting, value, f"is in {folder}, which is no directory", "make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigurationError(setting, value, "may not be written", "name another file")
