"""Where callbacks write: files that appear whole or not at all, and the standard streams."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Literal, TextIO

from torch import distributed

from dist_env import get_logger


def process_rank() -> int:
    """This process's rank in the world; 0 without a process group."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON object; empty when the file is missing, or is torn because a machine died over it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


logger = get_logger(__name__)


def print_block(text: str, stream: TextIO | None, *, default: Literal["stdout", "stderr"]) -> None:
    """Print and flush; with no stream, to the standard stream as it is now."""
    # Looked up at each call: tests, notebooks and loggers replace the standard streams.
    target = stream if stream is not None else (sys.stdout if default == "stdout" else sys.stderr)
    try:
        print(text, file=target, flush=True)
    except BrokenPipeError:
        logger.warning("nobody reads %s any more; the run continues without it", default)
