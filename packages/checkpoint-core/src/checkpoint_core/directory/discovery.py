"""Finding the newest good checkpoint, and proving one whole."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from checkpoint_core.directory.commit import restore_replaced
from checkpoint_core.directory.manifest import Manifest, read_manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import checksum_file

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)")


def find_latest_checkpoint(output_dir: str | Path, *, verify_checksums: bool = False) -> Path | None:
    """The committed checkpoint with the highest step.

    Each torn or damaged checkpoint that is passed over is named in a warning. A component file that the user
    deleted does not disqualify a checkpoint.

    Args:
        output_dir: The directory that holds ``checkpoint-<step>`` directories.
        verify_checksums: Read every file and compare its digest. Without it sizes are compared, which finds
            truncated files at the cost of a directory listing.

    Returns:
        The checkpoint's directory, or None when there is none.
    """
    found = next(good_checkpoints(Path(output_dir), checksums=verify_checksums), None)
    return None if found is None else found[0]


def good_checkpoints(output_dir: Path, *, checksums: bool) -> Iterator[tuple[Path, Manifest]]:
    """Committed checkpoints that pass verification, highest step first; the others are named in warnings.

    Args:
        output_dir: The directory of the checkpoints.
        checksums: Compare digests too, not only sizes.

    Yields:
        Directory and manifest.
    """
    restore_replaced(output_dir)
    for step, path in checkpoint_directories(output_dir):
        try:
            manifest = verify_checkpoint(path, checksums=checksums)
            if manifest.step != step:
                raise CheckpointError(f"{path} holds step {manifest.step}, not {step}; it was renamed")
        except (CheckpointError, OSError) as error:
            warn_passing_over(path, error)
            continue
        yield path, manifest


def warn_passing_over(path: Path, error: Exception) -> None:
    """Name a checkpoint that cannot be used, and why.

    Args:
        path: The checkpoint.
        error: What is wrong with it.
    """
    _logger.warning("passing over %s: %s", path.name, error)


def checkpoint_directories(output_dir: Path) -> list[tuple[int, Path]]:
    """Directories with a checkpoint's name, good or bad.

    Args:
        output_dir: The directory of the checkpoints.

    Returns:
        Step and path, highest step first; empty when ``output_dir`` does not exist.
    """
    if not output_dir.is_dir():
        return []
    found = [(match, path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found if path.is_dir()), reverse=True)


def verify_checkpoint(checkpoint: Path, *, checksums: bool) -> Manifest:
    """Check that the files of a checkpoint are what was committed. Deleted files are left out.

    Args:
        checkpoint: The checkpoint's directory.
        checksums: Compare digests too, not only sizes.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: A file is damaged; names it.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {checkpoint}")
    manifest = read_manifest(checkpoint)
    for name, record in manifest.files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            continue
        if size != record.size:
            raise CheckpointError(f"{path} is damaged: {size} bytes, {record.size} were written. {_remedy()}")
        if checksums and checksum_file(path).checksum != record.checksum:
            raise wrong_content(path)
    return manifest


def wrong_content(path: Path) -> CheckpointError:
    """The error for a file that does not match its checksum.

    Args:
        path: The file.

    Returns:
        The error, with the remedy.
    """
    return CheckpointError(f"{path} is damaged: its content does not match its checksum. {_remedy()}")


def _remedy() -> str:
    return "Restore the file, load another checkpoint, or delete the file to do without that component"
