"""Several iterators that give one item each in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def take_turns(iterators: Sequence[Iterator[Item]], first: int = 0) -> Iterator[tuple[int, Item]]:
    """Items of all iterators, one of each in turn; one that has ended is passed over.

    Args:
        iterators: Whom to ask, in the order of their numbers.
        first: Number of the one that begins.

    Yields:
        The number of an iterator, and its next item.
    """
    waiting = [*range(first, len(iterators)), *range(first)]
    while waiting:
        still: list[int] = []
        for number in waiting:
            for item in iterators[number]:
                yield number, item
                still.append(number)
                break
        waiting = still
