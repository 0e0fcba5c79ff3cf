"""The commit protocol: a checkpoint appears by one rename, after everything in it is on the disk.

Every function here is called by one rank only.
"""

import logging
import shutil
import uuid
from pathlib import Path

from checkpoint_core.directory.manifest import MANIFEST_NAME, read_manifest
from checkpoint_core.directory.ownership import DELETED, REPLACED, STAGING, find_leftovers, temporary_path
from checkpoint_core.errors import CheckpointError, free_bytes
from checkpoint_core.storage.files import sync_file

_logger = logging.getLogger(__name__)
_MARGIN_BYTES = 1024 * 1024
CHECKPOINT_PREFIX = "checkpoint-"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    Args:
        output_dir: The directory of the checkpoints.
        step: The step.

    Returns:
        ``<output_dir>/checkpoint-<step>``.
    """
    return output_dir / f"{CHECKPOINT_PREFIX}{step}"


def check_space(directory: Path, needed: int) -> None:
    """Refuse to begin what cannot be finished.

    Args:
        directory: Where to write; it need not exist.
        needed: Bytes.

    Raises:
        CheckpointError: There is not that much space; names both numbers and the directory.
    """
    free = free_bytes(directory)
    if needed + _MARGIN_BYTES > free:
        raise CheckpointError(
            f"not enough space for the checkpoint: it needs {needed} bytes ({needed / 1e9:.2f} GB), "
            f"{directory} has {free} bytes free ({free / 1e9:.2f} GB). Free space or lower save_total_limit"
        )


def check_target(final: Path, run_id: str) -> None:
    """Refuse to replace what this run did not write.

    Args:
        final: The checkpoint's final path.
        run_id: The id of this run.

    Raises:
        CheckpointError: Something else is there; names it and the remedy.
    """
    if not final.exists() and not final.is_symlink():
        return
    if final.is_symlink() or not (final / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{final} exists and is no committed checkpoint of checkpoint-core; move it away or choose "
            "another output_dir"
        )
    try:
        owner = read_manifest(final).run_id
    except CheckpointError:
        return  # A damaged checkpoint blocks nothing; publish() keeps it under another name.
    if owner != run_id:
        raise CheckpointError(
            f"{final} was written by another run ({owner}, this one is {run_id}); resume from it with "
            "load_checkpoint(), or choose another output_dir"
        )


def check_new(path: Path, output_dir: Path, step: int) -> None:
    """Refuse a directory of one's own choice that is there already, or would be misread.

    Args:
        path: Where a checkpoint is to be written that stands apart.
        output_dir: The directory of the run's other checkpoints.
        step: The step to be written.

    Raises:
        CheckpointError: Naming it and the remedy.
    """
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"path={str(path)!r} exists already; name a new directory, or move that away")
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    if number == path.name or not number.isdecimal():
        return
    if path.parent.resolve() == output_dir.resolve():
        raise CheckpointError(
            f"path={str(path)!r} is the place of a checkpoint of this run, which rotates; leave path out to "
            "save it there, or choose another name"
        )
    if int(number) != step:
        raise CheckpointError(
            f"path={str(path)!r} has the name of step {int(number)}, and this is step {step}; choose another "
            "name"
        )


def check_other_runs(output_dir: Path, step: int, run_id: str) -> None:
    """Refuse to write checkpoints that an automatic resume would pass over for those of another run.

    Args:
        output_dir: The directory of the checkpoints.
        step: The step to be written.
        run_id: The id of this run.

    Raises:
        CheckpointError: Another run wrote a later checkpoint here; names it and the remedy.
    """
    for path in output_dir.glob(f"{CHECKPOINT_PREFIX}*"):
        number = path.name.removeprefix(CHECKPOINT_PREFIX)
        if not number.isdecimal() or int(number) <= step:
            continue
        try:
            owner = read_manifest(path).run_id
        except (CheckpointError, OSError):
            continue
        if owner != run_id:
            raise CheckpointError(
                f"{path} was written by another run, and an automatic resume would choose it instead of step "
                f"{step} of this one; resume from it with load_checkpoint(), move it away, or choose another "
                "output_dir"
            )


def create_staging(output_dir: Path, step: int) -> Path:
    """Make the temporary directory in which a checkpoint is written.

    Args:
        output_dir: The directory of the checkpoints; made if needed.
        step: The step.

    Returns:
        The new directory.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    staging = temporary_path(output_dir, STAGING, step)
    staging.mkdir()
    return staging


def publish(staging: Path, final: Path, step: int) -> None:
    """Make a complete staging directory the checkpoint of its step.

    An older checkpoint of the same step is put aside by a rename, and removed afterwards. If the process dies
    between the two renames, :func:`clean_leftovers` puts the older one back. A damaged one is kept aside.

    Args:
        staging: The complete directory, with its manifest, synced to the disk.
        final: The checkpoint's final path.
        step: The step.
    """
    aside = _put_aside(final, step)
    try:
        staging.rename(final)
    except BaseException:
        if aside is not None and not final.exists():
            aside.rename(final)
        raise
    sync_file(final.parent)
    if aside is not None and aside.name.startswith("."):
        discard(aside)


def remove_checkpoint(checkpoint: Path, step: int) -> None:
    """Delete a checkpoint so that no moment shows it half deleted.

    Args:
        checkpoint: The checkpoint.
        step: Its step.
    """
    hidden = temporary_path(checkpoint.parent, DELETED, step)
    checkpoint.rename(hidden)
    discard(hidden)


def discard(directory: Path) -> None:
    """Remove a temporary directory; what cannot be removed is named in a warning and stays hidden.

    Args:
        directory: The directory.
    """
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning(
            "cannot remove the temporary directory %s (%s); the next save tries again", directory, error
        )


def restore_replaced(output_dir: Path) -> None:
    """Put back checkpoints whose replacement was interrupted between its two renames.

    Args:
        output_dir: The directory of the checkpoints.
    """
    for leftover in find_leftovers(output_dir):
        final = checkpoint_path(output_dir, leftover.step)
        if leftover.kind == REPLACED and not final.exists() and leftover.is_abandoned():
            try:
                leftover.path.rename(final)
            except FileNotFoundError:
                continue  # Another process put it back first.
            except OSError as error:
                _logger.warning("cannot put %s back as %s (%s)", leftover.path, final, error)
                continue
            _logger.warning("%s is back: the save that was replacing it was interrupted", final)


def clean_leftovers(output_dir: Path) -> None:
    """Remove what killed saves left behind; temporary directories of living processes stay.

    Args:
        output_dir: The directory of the checkpoints.
    """
    restore_replaced(output_dir)
    for leftover in find_leftovers(output_dir):
        if leftover.is_abandoned():
            _logger.info("removing %s, left behind by process %d", leftover.path, leftover.pid)
            discard(leftover.path)


def _put_aside(final: Path, step: int) -> Path | None:
    if not final.exists():
        return None
    try:
        read_manifest(final)
    except CheckpointError as error:
        aside = final.with_name(f"damaged-{final.name}-{uuid.uuid4().hex[:8]}")
        _logger.warning("keeping the damaged %s as %s (%s)", final, aside.name, error)
    else:
        aside = temporary_path(final.parent, REPLACED, step)
    final.rename(aside)
    return aside
