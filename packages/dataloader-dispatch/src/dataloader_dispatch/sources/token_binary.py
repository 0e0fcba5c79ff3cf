"""Token ids in binary files, mapped into memory."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.cache import RecentlyUsed
from dataloader_dispatch.sources.token_manifest import MANIFEST, Part, is_token_directory, read_manifest
from dataloader_dispatch.sources.unreadable import os_failure

__all__ = ["TokenBinary", "is_token_directory"]

Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.integer]]

_MAPPED_PARTS = 128
_CHUNK = 1 << 22


class _Mapped(NamedTuple):
    """A part. ``tokens`` has shape [number of tokens], ``offsets`` int64 [number of documents + 1]."""

    tokens: Integers
    offsets: Integers


class TokenBinary:
    """Documents that ``dataloader-dispatch tokenize`` wrote.

    The directory holds ``manifest.json`` and parts. ``part-00000.bin`` has the token ids of its documents end
    to end, without separators, little-endian in the type that the manifest names; ``part-00000.idx`` has,
    as int64, where each document starts, in tokens, and where the last one ends.

    The files are mapped when a document of theirs is asked for, at most 128 parts at a time, so that a
    directory larger than memory can be read in any order. Copies for other processes hold no map. Several
    processes may read at once, and share the memory.

    Args:
        directory: The directory.

    Raises:
        DataError: It does not exist, is not finished, or is damaged: the manifest, or the size or index of a
            part, which the message names. The content of the token files is not read; see `verify`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser()
        self.manifest = read_manifest(self.directory)
        parts = self.manifest.parts
        self._starts = array("Q", accumulate((part.documents for part in parts), initial=0))
        self._mapped: RecentlyUsed[_Mapped] = RecentlyUsed(0, _MAPPED_PARTS)
        for part in parts:
            self._check_sizes(part)
            self._check_index(part)
        if not len(self):
            raise DataError(f"{self.directory} holds no document; tokenize data that hold some")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """Token ids of a document, without separator.

        Returns:
            int64 tensor of shape [number of tokens], with memory of its own.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The file of the document is gone or shorter than it was.
        """
        number, place = self._locate(index)
        mapped = self._part(number)
        start, stop = mapped.offsets[place : place + 2]
        return torch.from_numpy(mapped.tokens[start:stop].astype(np.int64))

    @property
    def num_tokens(self) -> int:
        """Token ids of all documents, separators not included."""
        return self.manifest.tokens

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's separator, which the files do not hold; None if it has none."""
        return self.manifest.eos_token_id

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id that the tokenizer may give, the separator included."""
        return self.manifest.vocabulary_size

    def token_counts(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Number of tokens of each of consecutive documents, from the index alone.

        Args:
            start: First document.
            stop: Document after the last one; None for all that remain.

        Returns:
            int64 tensor of shape [stop - start].

        Raises:
            IndexError: ``0 <= start <= stop <= len(self)`` does not hold.
            DataError: A file is gone.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} are outside a source of {len(self)} documents")
        counts = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            number, place = self._locate(at)
            end = min(stop, self._starts[number + 1])
            offsets = self._part(number).offsets[place : place + end - at + 1]
            counts[at - start : end - start] = np.diff(offsets)
            at = end
        return torch.from_numpy(counts)

    def where(self, index: int) -> str:
        """The place of a document in words."""
        number, place = self._locate(index)
        return f"{self.directory / self.manifest.parts[number].name}.bin document {place}"

    def fingerprint(self) -> str:
        """Digest of numbers, lengths and checksums in the manifest; a copy elsewhere has the same."""
        return self.manifest.fingerprint()

    def verify(self) -> None:
        """Read all files and compare them with the checksums in the manifest.

        Raises:
            DataError: A file differs; the message names it.
        """
        for part in self.manifest.parts:
            for ending, expected in ((".bin", part.bin_crc32), (".idx", part.idx_crc32)):
                path = self.directory / f"{part.name}{ending}"
                if (found := _checksum(path)) != expected:
                    raise _damaged(path, f"has the CRC-32 {found:#x}, and {MANIFEST} says {expected:#x}")

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the part, and of the document in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} is outside a source of {len(self)} documents")
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _part(self, number: int) -> _Mapped:
        return self._mapped.get(number, lambda: (self._map(self.manifest.parts[number]), 0))

    def _map(self, part: Part) -> _Mapped:
        self._check_sizes(part)
        kind = np.dtype(self.manifest.dtype).newbyteorder("<")
        path = self.directory / part.name
        tokens = _memory_map(path.with_suffix(".bin"), kind, part.tokens)
        return _Mapped(tokens, _memory_map(path.with_suffix(".idx"), np.dtype("<i8"), part.documents + 1))

    def _check_sizes(self, part: Part) -> None:
        for name, expected in part.sizes(self.manifest.dtype).items():
            path = self.directory / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise os_failure(str(path), error) from error
            if size != expected:
                raise _damaged(path, f"has {size} bytes, and {MANIFEST} says {expected}")

    def _check_index(self, part: Part) -> None:
        path = self.directory / f"{part.name}.idx"
        try:
            offsets = np.fromfile(path, dtype="<i8")
        except OSError as error:
            raise os_failure(str(path), error) from error
        if offsets[0] != 0 or offsets[-1] != part.tokens or (np.diff(offsets) < 0).any():
            raise _damaged(
                path,
                f"does not rise from 0 to the {part.tokens} tokens of the part, as an index of offsets does",
            )


def _memory_map(path: Path, kind: np.dtype[np.integer], count: int) -> Integers:
    if count == 0:
        return np.empty(0, dtype=kind)  # an empty file cannot be mapped
    try:
        return np.memmap(path, dtype=kind, mode="r", shape=(count,))
    except OSError as error:
        raise os_failure(str(path), error) from error


def _checksum(path: Path) -> int:
    value = 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(_CHUNK):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise os_failure(str(path), error) from error
    return value


def _damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} is damaged or not complete: it {what}; copy the directory again, or tokenize again with "
        "--overwrite"
    )
