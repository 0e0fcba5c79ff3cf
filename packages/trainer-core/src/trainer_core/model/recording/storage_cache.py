"""Which storages keep their content while a model is being built, and which are freed for a while."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .replay import Version, replay

ALWAYS_KEPT = 64 * 2**20
"""Bytes of tensors other than parameters that are never freed."""
LARGEST_KEPT = 4
"""Beyond `ALWAYS_KEPT`, tensors other than parameters may take as much as this many of the largest one."""

HANDED_BACK = 32 * 2**20
"""After freeing as many bytes the memory is handed back to the system."""


class Tracked:
    """A storage and its present content.

    Args:
        storage: The storage; only a weak reference is kept.
        version: How the content is computed; None if steps that are not recorded may change it.
    """

    __slots__ = (
        "device",
        "is_parameter",
        "nbytes",
        "reference",
        "releasable",
        "released",
        "version",
    )

    def __init__(self, storage: torch.UntypedStorage, version: Version | None) -> None:
        self.reference = StorageWeakRef(storage)
        self.device = storage.device
        self.nbytes = storage.nbytes()
        self.version = version
        self.releasable = version is not None and storage.resizable()
        self.is_parameter = False
        self.released = False

    @property
    def alive(self) -> bool:
        """Whether a tensor still uses the storage."""
        return not self.reference.expired()

    def measure(self) -> None:
        """Note a new size."""
        storage = self._storage()
        if storage is not None and not self.released:
            self.nbytes = storage.nbytes()

    def release(self) -> None:
        """Free the memory; the content can be computed again."""
        storage = self._storage()
        if storage is not None and self.nbytes:
            storage.resize_(0)
            self.released = True

    def restore(self, *, content: bool = True) -> None:
        """Take the memory again, with or without the content."""
        storage = self._storage()
        if not self.released or storage is None:
            return
        storage.resize_(self.nbytes)
        self.released = False
        if content and self.version is not None:
            storage.copy_(replay(self.version))

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """Let a freed storage have its size for a moment, as operators that make views demand."""
        storage = self._storage() if self.released else None
        if storage is None:
            yield
            return
        storage.resize_(self.nbytes)
        try:
            yield
        finally:
            storage.resize_(0)

    def _storage(self) -> torch.UntypedStorage | None:
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return found


class StorageCache:
    """Frees storages: all parameters but those worked on last, and others when they become too many."""

    def __init__(self) -> None:
        self._parameters: dict[int, Tracked] = {}
        self._others: dict[int, Tracked] = {}  # least recently used first
        self._bytes = 0
        self._freed = 0

    def use(self, tracked: dict[int, Tracked]) -> None:
        """Note which storages are worked on now, and free others."""
        for key, storage in tracked.items():
            self.forget(key)
            if storage.released or not storage.releasable:
                continue
            if storage.is_parameter:
                self._parameters[key] = storage
            else:
                self._others[key] = storage
                self._bytes += storage.nbytes
        if any(storage.is_parameter for storage in tracked.values()):
            for key in self._parameters.keys() - tracked.keys():
                self._free(self._parameters.pop(key))
        if self._bytes > ALWAYS_KEPT:
            self._bound(tracked)

    def forget(self, key: int) -> None:
        """Leave a storage alone."""
        self._parameters.pop(key, None)
        if key in self._others:
            self._bytes -= self._others.pop(key).nbytes

    def _bound(self, in_use: Collection[int]) -> None:
        self._others = {key: storage for key, storage in self._others.items() if storage.alive}
        self._bytes = sum(storage.nbytes for storage in self._others.values())
        limit = max(ALWAYS_KEPT, LARGEST_KEPT * max((s.nbytes for s in self._others.values()), default=0))
        for key in [key for key in self._others if key not in in_use]:
            if self._bytes <= limit:
                return
            storage = self._others[key]
            self.forget(key)
            self._free(storage)

    def _free(self, storage: Tracked) -> None:
        storage.release()
        self._freed += storage.nbytes if storage.device.type == "cpu" else 0
        if self._freed > HANDED_BACK:
            self._freed = 0
            _hand_back()


def _hand_back() -> None:
    """Make the C library give free memory back; glibc keeps blocks below 32 MiB, and they scatter."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """The function of glibc, see malloc_trim(3); other C libraries have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
