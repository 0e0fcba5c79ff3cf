"""Write the parts of a directory of token ids: each file appears under its name when it is on the disk."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dataloader_dispatch.documents import Integers
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.token_binary import Part, TokenType

_BUFFER = 1 << 20


class PartWriter:
    """Takes documents one by one; the two files get their names when all of it is on the disk.

    Args:
        directory: Where the part goes.
        name: Its name, without ending.
        dtype: Type of the token ids in the file.
        vocabulary_size: One more than the largest token id allowed.
        scratch: Directory for the files until they are complete, on the same file system.
    """

    def __init__(
        self, directory: Path, name: str, dtype: TokenType, vocabulary_size: int, scratch: Path
    ) -> None:
        self._final = {ending: directory / f"{name}{ending}" for ending in (".bin", ".idx")}
        # Each process has names of its own: one that was believed dead must not write into another's file.
        own = own_name(name)
        self._temporary = {ending: scratch / f"{own}{ending}" for ending in (".bin", ".idx")}
        self._name = name
        self._kind = np.dtype(dtype).newbyteorder("<")
        self._vocabulary_size = min(vocabulary_size, int(np.iinfo(dtype).max) + 1)
        self._lengths: list[int] = []
        self._checksum = 0
        self._tokens = self._temporary[".bin"].open("wb", buffering=_BUFFER)

    def append(self, tokens: Integers, lengths: Sequence[int]) -> None:
        """Add documents.

        Args:
            tokens: Token ids of all of them, end to end, of any integer type, without separators.
            lengths: Number of tokens of each.

        Raises:
            DataError: A token id is not in ``range(vocabulary_size)``, or the type cannot hold it.
            OSError: The file cannot be written.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocabulary_size:
            raise DataError(
                f"the tokenizer gave token ids from {tokens.min()} to {tokens.max()}, but its vocabulary "
                f"has {self._vocabulary_size} entries, so the tokenizer's files do not fit together."
            )
        raw = tokens.astype(self._kind).tobytes()
        self._tokens.write(raw)
        self._checksum = zlib.crc32(raw, self._checksum)
        self._lengths.extend(lengths)

    def finish(self) -> Part:
        """Put both files on the disk under their names.

        Raises:
            OSError: A file cannot be written.
        """
        offsets = np.zeros(len(self._lengths) + 1, dtype="<i8")
        np.cumsum(self._lengths, out=offsets[1:])
        raw = offsets.tobytes()
        _write_synced(self._tokens, b"")
        _write_synced(self._temporary[".idx"].open("wb"), raw)
        for ending, path in self._temporary.items():
            path.replace(self._final[ending])
        sync_directory(self._final[".bin"].parent)
        return Part(self._name, len(self._lengths), int(offsets[-1]), self._checksum, zlib.crc32(raw))

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what is not complete."""
        self._tokens.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)


def _write_synced(stream: BinaryIO, data: bytes) -> None:
    """Write the last bytes of a file, and close it when all of it is on the disk."""
    with stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_durably(path: Path, text: str, *, scratch: Path | None = None) -> None:
    """Replace a file in one step; the new content is on the disk then.

    Args:
        path: The file.
        text: What it is to hold.
        scratch: Where it is written first, and a kill may leave it; beside the file by default.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = (scratch or path.parent) / own_name(path.name)
    _write_synced(temporary.open("wb"), text.encode())
    temporary.replace(path)
    sync_directory(path.parent)


def claim_durably(path: Path, text: str) -> bool:
    """Write a file only if nobody else has, in one step; its content is on the disk then.

    Returns:
        Whether it was written.

    Raises:
        OSError: The file cannot be written, or the file system has no hard links.
    """
    temporary = path.with_name(own_name(path.name))
    _write_synced(temporary.open("wb"), text.encode())
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    return True


def own_name(name: str) -> str:
    """A name that no other process uses, on this machine or another one with the same file system."""
    return f"{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
