"""What cannot be read, and what is not the fault of the data."""

from __future__ import annotations

import errno

from dataloader_dispatch.errors import DataError

_EXHAUSTED = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer worker processes",
    errno.ENFILE: "the whole machine has too many files open; close some, or raise the limit",
    errno.ENOMEM: "free memory, or use fewer worker processes",
}


class UnreadableError(DataError):
    """A file or document is at fault. With ``unreadable="skip"`` it is left out and counted."""


def os_failure(path: str, error: OSError) -> DataError:
    """The error for a file that the system will not read.

    What a process has run out of says nothing about the file, so that is no `UnreadableError`: the file must
    not be left out for it.
    """
    remedy = _EXHAUSTED.get(error.errno or 0)
    text = f"cannot read the data file {path}: {error.strerror or error}"
    return DataError(f"{text}; {remedy}") if remedy else UnreadableError(text)


def refuse_changed(path: str, size: int, expected: int) -> None:
    """Refuse a file whose size is another than when it was opened: its documents are not those of then.

    Raises:
        UnreadableError: The sizes differ.
    """
    if size != expected:
        raise UnreadableError(
            f"{path} has {size} bytes and had {expected} when it was opened; it was changed in the meantime: "
            "open the data again, or put the file back as it was"
        )


def refuse_large(place: str, size: int, limit: int) -> None:
    """Refuse a document that is larger than ``max_document_bytes``.

    Args:
        place: The document in words.
        size: Its bytes.
        limit: The setting.

    Raises:
        UnreadableError: It is larger.
    """
    if size > limit:
        raise UnreadableError(
            f"{place} has {size} bytes, more than max_document_bytes={limit}; split it, raise "
            "max_document_bytes if memory allows, or leave such documents out with unreadable='skip'"
        )
