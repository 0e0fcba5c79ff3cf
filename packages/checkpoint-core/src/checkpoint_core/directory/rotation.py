"""Keeping disk use bounded: the oldest checkpoints of this run go, nothing else ever does."""

import logging
from collections.abc import Collection
from pathlib import Path

from checkpoint_core.directory.commit import remove_checkpoint
from checkpoint_core.directory.discovery import checkpoint_directories, verify_checkpoint
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError

_logger = logging.getLogger(__name__)


def rotate(
    output_dir: Path, *, limit: int | None, run_id: str, newest: Path, protected: Collection[Path] = ()
) -> list[Path]:
    """Delete checkpoints of this run beyond the limit, those with the lowest steps first.

    Never deleted are the checkpoint just written, protected checkpoints, directories without a valid
    manifest, damaged checkpoints, checkpoints of other runs, and copies or links under other names than the
    run gave. Of these only the checkpoint just written counts against the limit, unless it is protected too.

    Args:
        output_dir: The directory of the checkpoints.
        limit: How many to keep beside the protected ones, at least 1; None keeps all.
        run_id: The id of this run.
        newest: The checkpoint just written.
        protected: Checkpoints to keep whatever the limit, such as the best ones and the one resumed from.

    Returns:
        The paths that were deleted.
    """
    if limit is None:
        return []
    # Resolved, because the same checkpoint may be named relative to the working directory or through a link.
    exempt = {path.resolve() for path in protected}
    room = limit if newest.resolve() in exempt else limit - 1
    others = _deletable(output_dir, run_id, exempt | {newest.resolve()})
    # Steps beyond the newest are of a branch that this run went back from: they go before its own.
    reached = int(newest.name.removeprefix("checkpoint-"))
    others.sort(key=lambda item: (item[0] > reached, -item[0]))
    removed = []
    for step, path in others[room:]:
        try:
            remove_checkpoint(path, step)
        except OSError as error:
            # The new checkpoint is safe, so this is no reason to stop the training.
            _logger.warning("cannot delete the old checkpoint %s (%s)", path, error)
            continue
        _logger.info("deleted %s: save_total_limit is %d", path, limit)
        removed.append(path)
    return removed


def manifest_of_run(path: Path, step: int, run_id: str) -> Manifest | None:
    """The manifest of a checkpoint, if it is whole and this run wrote it under this name.

    Args:
        path: The checkpoint.
        step: The step that its name says.
        run_id: The id of this run.

    Returns:
        The manifest; None when the checkpoint is damaged, renamed, another run's, or not this user's to read.

    Raises:
        OSError: The storage failed, so that nothing can be told.
    """
    if path.name != f"checkpoint-{step}":
        return None  # "checkpoint-007" is somebody's copy.
    try:
        manifest = verify_checkpoint(path, checksums=False)
    except (CheckpointError, FileNotFoundError, PermissionError):
        return None
    return manifest if (manifest.run_id, manifest.step) == (run_id, step) else None


def _deletable(output_dir: Path, run_id: str, kept: Collection[Path]) -> list[tuple[int, Path]]:
    found = []
    for step, path in checkpoint_directories(output_dir):
        try:
            known = not path.is_symlink() and manifest_of_run(path, step, run_id) is not None
        except OSError:
            continue  # What cannot be read is not deleted.
        if known and path.resolve() not in kept:
            found.append((step, path))
    return found
