"""Blocks of objects in a directory that all processes of a machine share, up to a limit.

A block is a file of its own. It is written under another name and renamed when all of it is there; a reader
compares the length. So what a killed writer or a full disk leaves is never read as data. Blocks are not
synced to the disk: they lie in a folder of this start of the machine, and those from before a power failure
are not used again. What the files hold is trusted: the directory belongs to one user.

This module and its neighbour `fetcher` run in a process that imports neither torch nor numpy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

BLOCK_BYTES = 1 << 20
"""Bytes of a block; the last one of an object is shorter."""
SMALL_BLOCK_BYTES = 1 << 17
"""The same of data larger than their cache, of which blocks are fetched for a document each."""
WHOLE = "whole"
"""In place of the number of a block: the object as one file."""
_PAGE = 4096
_TOUCH_SECONDS = 60.0
_KEPT_SHARE = 0.9
_TEMPORARY = ".writing-"
_LOCK = ".usage"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_numbers = itertools.count()
Buffer: TypeAlias = Any
"""Bytes, or what gives a view of its bytes; `collections.abc.Buffer` of Python 3.12."""


def object_name(root: str, key: str, size: int, version: Mapping[str, str]) -> str:
    """The name of an object's content in a cache: another one for each content of the same object."""
    told = json.dumps([root, key, size, sorted(version.items())])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:40]


class BlockCache:
    """Reads and writes blocks.

    Args:
        directory: The cache.
        limit: Bytes that all files in it may take together, counted in pages of 4096 bytes.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._folder = os.path.join(directory, _boot())  # noqa: PTH118  (once a read)
        self._lock = threading.Lock()

    def path(self, name: str, block: int | str) -> str:
        """The file of a block."""
        return f"{self._folder}/{name[:2]}/{name}-{block}"

    def holds(self, name: str, block: int | str, length: int) -> bool:
        """Whether a block is there."""
        try:
            return os.stat(self.path(name, block)).st_size == length  # noqa: PTH116  (once a read)
        except OSError:
            return False

    def read(self, name: str, block: int, length: int, start: int, stop: int) -> bytes | None:
        """The bytes of a block from ``start`` up to, not including, ``stop``; None if it is not there.

        Args:
            name: The object's name in the cache.
            block: Number of the block.
            length: Bytes of the whole block.
            start: First byte, counted from the start of the block.
            stop: Byte behind the last one.
        """
        try:
            handle = os.open(self.path(name, block), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(handle)
            if status.st_size != length:
                return None
            # Those used longest ago go first. A file system need not note what is read.
            if time.time() - status.st_mtime > _TOUCH_SECONDS:
                _touch(handle)
            data = os.pread(handle, stop - start, start)
            return data if len(data) == stop - start else None
        except OSError:
            return None  # a disk that fails; the store has it still
        finally:
            os.close(handle)

    def write(self, name: str, block: int, data: Buffer) -> None:
        """Write a block.

        Raises:
            OSError: It cannot be written, or the limit leaves no room for it.
        """
        with self.writing(name, block, memoryview(data).nbytes) as handle:
            write_at(handle, data, 0)

    @contextmanager
    def writing(self, name: str, block: int | str, size: int) -> Iterator[int]:
        """A new file of a size, open for writing; it gets its name at the end, if nothing was raised.

        Raises:
            OSError: It cannot be written, or the limit leaves no room for it.
        """
        path = self.path(name, block)
        temporary = f"{path}{_TEMPORARY}{os.getpid()}-{next(_numbers)}"
        handle = self._reserve(temporary, size)
        try:
            yield handle
            os.rename(temporary, path)  # noqa: PTH104
        except BaseException:
            _remove(temporary)
            raise
        finally:
            os.close(handle)

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Lets one process after another work for an object.

        Raises:
            OSError: The directory cannot be written.
        """
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        handle = os.open(f"{self._folder}/.turn-{name[:3]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _reserve(self, temporary: str, size: int) -> int:
        """Make a file of a size, when what is there leaves room for it under the limit."""
        taken = pages(size)
        os.makedirs(os.path.dirname(temporary), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        with self._locked() as usage:
            noted = os.pread(usage, 8, 0)
            used = int.from_bytes(noted, "little") if len(noted) == 8 else self._used()
            if used + taken > self.limit:
                used = self._evict(min(self.limit - taken, int(self.limit * _KEPT_SHARE)))
                if used + taken > self.limit:
                    raise OSError(errno.EDQUOT, f"the limit of {self.limit} bytes leaves no room")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            handle = os.open(temporary, flags, 0o600)
            try:
                # Whoever removes what killed writers left finds this one held, and counts it in full.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(handle, size)
                os.pwrite(usage, (used + taken).to_bytes(8, "little"), 0)
            except BaseException:
                os.close(handle)
                _remove(temporary)
                raise
            return handle

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file that holds the bytes in use, locked against threads and processes."""
        with self._lock:
            place = f"{self.directory}/{_LOCK}"
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                yield handle
            finally:
                os.close(handle)

    def _used(self) -> int:
        return sum(file.taken for file in self._files())

    def _evict(self, target: int) -> int:
        """Remove files, those used longest ago first, until they take ``target`` bytes; what they take."""
        files = sorted(self._files())
        used = sum(file.taken for file in files)
        for file in files:
            if used <= target:
                break
            if _TEMPORARY in file.path and _is_held(file.path):
                continue
            # One that was written to its end since it was listed is there still, under its name.
            if _remove(file.path) or _TEMPORARY not in file.path:
                used -= file.taken
        return used

    def _files(self) -> Iterator[_File]:
        """All files in the cache, also those of earlier starts of the machine."""
        waiting = [self.directory]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        elif not entry.name.startswith("."):
                            status = entry.stat(follow_symlinks=False)
                            yield _File(status.st_mtime, pages(status.st_size), entry.path)
            except FileNotFoundError:
                continue  # another process removed it


class _File(NamedTuple):
    used: float
    """When it was written or read, in seconds since 1970."""
    taken: int
    path: str


def pages(size: int) -> int:
    """Bytes that a file of a size takes."""
    return -(-size // _PAGE) * _PAGE


def write_at(handle: int, data: Buffer, start: int) -> None:
    """Write all bytes to a place of a file.

    Raises:
        OSError: The disk is full, or fails.
    """
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(handle, left, start)
        left, start = left[written:], start + written


def _boot() -> str:
    """What tells this start of the machine from others."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "any"


def _touch(handle: int) -> None:
    try:
        os.utime(handle)
    except OSError:
        return  # it belongs to another user, or the disk is read-only: only the order of eviction differs


def _remove(path: str) -> bool:
    """Remove a file; whether it was there."""
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


def _is_held(path: str) -> bool:
    """Whether the process that writes a file lives."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
