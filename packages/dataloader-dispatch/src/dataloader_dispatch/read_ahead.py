"""What is read soon: the order of documents is known ahead, so a source can be told before it is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

logger = logging.getLogger("dataloader_dispatch.stream")

DOCUMENTS_AHEAD = 256
"""Documents that a process tells its source to be read soon, over all its shards; at least 2 of each."""
ReadAhead: TypeAlias = Callable[[Sequence[int]], None]
"""Takes the numbers of documents that are read soon, in order."""


def read_ahead_of(source: object) -> ReadAhead | None:
    """What a source wants to be told of documents that are read soon; None if nothing."""
    told: ReadAhead | None = getattr(source, "will_read", None)
    return told


class DocumentsAhead:
    """Tells a source which documents a few shards read soon. Each document is told once, some at a time.

    Args:
        told: Takes the numbers of documents.
        order: Numbers of all documents in the epoch's order.
        shards: Number of all shards.
        places: Position in the order of each of those that are read here, by its number.
    """

    def __init__(self, told: ReadAhead, order: Sequence[int], shards: int, places: Mapping[int, int]) -> None:
        self._told = told
        self._order = order
        self._shards = shards
        self._window = max(2, DOCUMENTS_AHEAD // max(1, len(places))) * shards
        self._next = {shard: place + shards for shard, place in places.items()}
        # What every shard begins with is wanted before any gives its first row.
        self._tell([place for place in places.values() if place < len(order)])

    def tell(self, shard: int, position: int) -> None:
        """A shard is at a position of the order."""
        begin = self._next[shard]
        if begin - position > self._window // 2 or begin >= len(self._order):
            return
        stop = position + self._window + self._shards
        self._next[shard] = begin + -(-(stop - begin) // self._shards) * self._shards
        self._tell(range(begin, min(stop, len(self._order)), self._shards))

    def _tell(self, positions: Sequence[int]) -> None:
        try:
            self._told([self._order[position] for position in positions])
        except Exception as error:  # noqa: BLE001  (a source may raise anything)
            # What is wrong is said when the documents are read in their turn.
            logger.debug("the source cannot read ahead: %r", error)
