"""Where callbacks write, and how a file appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed


def process_rank() -> int:
    """This process's rank in the world; 0 without a process group."""
    distributed = torch.distributed
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
