"""``ls``: the checkpoints of a directory at a glance."""

import time
from pathlib import Path

from checkpoint_core.cli.console import age_text, print_table, size_text
from checkpoint_core.cli.survey import (
    Survey,
    describe_leftover,
    metrics_text,
    open_directory,
    survey_all,
    total_bytes,
)
from checkpoint_core.directory.manifest import MANIFEST_NAME
from checkpoint_core.directory.ownership import find_leftovers

_HEADER = ("step", "age", "size", "ranks", "metrics", "state")


def list_checkpoints(directory: Path) -> int:
    """Print one row for each checkpoint, and for what saves left behind. Changes nothing.

    Args:
        directory: The directory that holds the checkpoints.

    Returns:
        0, or 1 when a checkpoint is torn, damaged or of a newer version.

    Raises:
        CheckpointError: The directory is not there, or is a checkpoint.
    """
    open_directory(directory)
    found = list(survey_all(directory, checksums=False))
    rows = [_row(checkpoint) for checkpoint in found]
    for leftover in find_leftovers(directory):
        rows.append(
            [
                str(leftover.step),
                _age(leftover.path),
                _size(leftover.path),
                "",
                "",
                describe_leftover(leftover),
            ]
        )
    for path in sorted(directory.glob("damaged-checkpoint-*")):
        state = f"kept aside when its step was saved again ({path.name})"
        rows.append([path.name.split("-")[2], _age(path), _size(path), "", "", state])
    if rows:
        print_table(_HEADER, rows)
    else:
        print(f"no checkpoints in {directory}")
    return 0 if all(checkpoint.good for checkpoint in found) else 1


def _row(checkpoint: Survey) -> list[str]:
    manifest = checkpoint.manifest
    return [
        checkpoint.path.name.rpartition("-")[2],
        _age(checkpoint.path),
        _size(checkpoint.path),
        str(manifest.world_size) if manifest else "",
        metrics_text(manifest) if manifest else "",
        checkpoint.describe(),
    ]


def _age(path: Path) -> str:
    # A directory's time changes when a file in it is deleted; the manifest is written once, last.
    for candidate in (path / MANIFEST_NAME, path):
        if candidate.exists():
            return age_text(time.time() - candidate.stat().st_mtime)
    return ""


def _size(path: Path) -> str:
    return size_text(total_bytes(path))
