"""The errors of this package, and how operating system errors become them."""

import errno
import shutil
from contextlib import suppress
from pathlib import Path

from dist_env import StoreError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or applied.

    The message names the file, component or tensor, says what is wrong, and how to continue. When several
    ranks take part, every rank raises the error with the same message.

    Attributes:
        may_pass: Whether the same may succeed later, as where a store could not be reached or a disk was
            full; on every rank what it is where it failed.
    """

    may_pass = False


class LostRankError(CheckpointError):
    """The ranks could not save or load together, because one of them is gone or did not answer.

    Nothing is wrong with checkpoints or settings: the job, started again, continues from the last one.
    """


class LeaseLostError(CheckpointError):
    """The directory is no longer this run's own: nothing more may be written to it."""


def describe_error(error: BaseException) -> str:
    """Say in one line what went wrong, with the file and the remedy where they are known.

    Args:
        error: Any exception raised while a checkpoint was written or read.

    Returns:
        The message for a :class:`CheckpointError`.
    """
    if isinstance(error, (CheckpointError, StoreError)):
        text = str(error)
    elif isinstance(error, OSError):
        text = _describe_os_error(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return text if text.endswith((".", "?")) else f"{text}."


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write to the file system of ``directory``.

    Args:
        directory: A path; where it does not exist yet, its nearest existing parent is asked.

    Returns:
        Free space in bytes, without the part reserved for the superuser. Quotas are not included.
    """
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _describe_os_error(error: OSError) -> str:
    where = error.filename2 or error.filename
    text = f"{error.strerror or error}" + (f": {where}" if where else "")
    if error.errno in _NO_ROOM:
        text = f"no space left to write{f' {where}' if where else ''} ({error.strerror})"
        if where is not None:
            with suppress(OSError):  # The storage may be gone; the first error is the one to tell.
                text += f"; {free_bytes(Path(str(where)))} bytes are free there"
        return f"{text}. Free space, raise the quota or file size limit, or lower save_total_limit"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}. Give this user permission to read and write there, or choose another directory"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{text}. Raise the limit of open files (ulimit -n)"
    return text
