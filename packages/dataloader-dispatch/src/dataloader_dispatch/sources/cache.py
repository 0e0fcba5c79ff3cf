"""Keeps what was read or mapped last."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class RecentlyUsed(Generic[Value]):
    """Values by key; those used longest ago go first. Copies for other processes start empty.

    There is no lock, as a lock that some thread holds while the process forks is never released in the child.
    Every step on the dict is atomic, and two threads that miss the same key both load it.

    Args:
        max_bytes: Memory that all values may take together, by what `get` is told. The newest one is always
            kept.
        max_entries: Number of values, which bounds the files that are held open.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._kept: dict[Hashable, tuple[Value, int]] = {}

    def get(self, key: Hashable, load: Callable[[], tuple[Value, int]]) -> Value:
        """The value of a key.

        Args:
            key: The key.
            load: Makes the value if it is not kept; gives it with the bytes of memory it takes.
        """
        entry = self._kept.pop(key, None)
        if entry is None:
            entry = load()
            self._make_room(entry[1])
        self._kept[key] = entry
        return entry[0]

    def __reduce__(self) -> tuple[type[RecentlyUsed[Value]], tuple[int, int]]:
        return type(self), (self._max_bytes, self._max_entries)

    def _make_room(self, size: int) -> None:
        kept = list(self._kept.items())
        total = size + sum(cost for _, (_, cost) in kept)
        for number, (key, (_, cost)) in enumerate(kept):
            if total <= self._max_bytes and len(kept) - number < self._max_entries:
                return
            self._kept.pop(key, None)
            total -= cost
