"""Keeping disk use bounded: the oldest checkpoints of this run go, nothing else ever does."""

import logging
from pathlib import Path

from checkpoint_core.commit import remove_checkpoint
from checkpoint_core.discovery import checkpoint_directories, verify_checkpoint
from checkpoint_core.errors import CheckpointError

_logger = logging.getLogger(__name__)


def rotate(output_dir: Path, *, limit: int | None, run_id: str, newest: Path) -> list[Path]:
    """Delete checkpoints of this run beyond the limit, those with the lowest steps first.

    Never deleted are the checkpoint just written, directories without a valid manifest, damaged checkpoints
    (which do not count either) and checkpoints of other runs.

    Args:
        output_dir: The directory of the checkpoints.
        limit: How many to keep, at least 1; None keeps all.
        run_id: The id of this run.
        newest: The checkpoint just written.

    Returns:
        The paths that were deleted.
    """
    if limit is None:
        return []
    others = []
    for step, path in checkpoint_directories(output_dir):
        try:
            manifest = verify_checkpoint(path, checksums=False)
        except (CheckpointError, OSError):
            continue
        if path != newest and manifest.run_id == run_id and manifest.step == step:
            others.append((step, path))
    removed = []
    for step, path in others[limit - 1 :]:
        try:
            remove_checkpoint(path, step)
        except OSError as error:
            # The new checkpoint is safe, so this is no reason to stop the training.
            _logger.warning("cannot delete the old checkpoint %s (%s)", path, error)
            continue
        _logger.info("deleted %s: save_total_limit is %d", path, limit)
        removed.append(path)
    return removed
