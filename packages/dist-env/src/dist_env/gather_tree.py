"""How values travel from all ranks of a group to the first: through whom, equal ones as one, and arriving.

The ranks are numbered from 0 and form a binomial tree: each reports to the one whose number lacks its lowest
bit, and speaks for itself and for those that follow it, up to the next that reports to the same or another.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from dist_env.encoding import decode_value

if TYPE_CHECKING:
    import torch.distributed as dist

    from dist_env.control_group import ControlGroup

HEAD = 8
"""Bytes in front of a message that tell its size."""
LOOK_SECONDS = 0.2
"""How often a wait looks for what went wrong."""

BYTES_PER_VALUE = 64
"""More than a table has for a value and one row of its ranks, beside the value itself."""

Table = dict[bytes, list[int]]
"""What ranks have, each message with the positions where a row of such ranks begins, ends, begins, ..."""
Unread = tuple[int, str]
"""Position of the rank whose message cannot be read, and why."""


def above(index: int) -> int:
    """The rank that one reports to; the first has none, and gets itself."""
    return index & (index - 1) if index else 0


def below(index: int, size: int) -> list[tuple[int, int]]:
    """The ranks that report to one, and where those that each speaks for end."""
    step, found = 1, []
    while index + step < size and not index & step:
        found.append((index + step, min(index + 2 * step, size)))
        step *= 2
    return found


def beside(index: int, size: int) -> set[int]:
    """The ranks that gathers, broadcasts from the first and reductions connect with one, maybe itself."""
    ring = {(index + 1) % size, (index - 1) % size}
    report = {above(index), *(child for child, _ in below(index, size))}
    # gloo's broadcast: the highest bit of a position leads to who sends to it.
    bits = range(index.bit_length(), size.bit_length())
    broadcast = {index - (1 << index.bit_length() >> 1), *(index + (1 << bit) for bit in bits)}
    return ring | report | {other for other in broadcast if other < size}


def merge(table: Table, more: Table) -> None:
    """Add the table of ranks that come behind."""
    for message, ends in more.items():
        known = table.setdefault(message, [])
        if known and known[-1] == ends[0]:
            known.pop()
            ends = ends[1:]
        known += ends


def read_table(message: bytes, ranks: range, most_bytes: int) -> Table | Unread:
    """The table of these ranks, or who of them sent none that can be read."""
    try:
        read = decode_value(message)
    except ValueError as error:
        return ranks.start, str(error)
    match read:
        case (int(index), str(reason)) if index in ranks:
            return index, reason
        case dict() if _covers(read, ranks):
            for each, ends in read.items():
                if len(each) > most_bytes:
                    return ends[0], f"it is said to have {len(each)} bytes"
            return read
    return ranks.start, "it holds no values of ranks"


def _covers(table: dict[object, object], ranks: range) -> bool:
    """Whether a table says of each of the ranks, and of no other, what it has."""
    rows: list[tuple[int, int]] = []
    for message, ends in table.items():
        if not isinstance(message, bytes) or not isinstance(ends, list) or not ends or len(ends) % 2:
            return False
        if not all(type(end) is int for end in ends):
            return False
        rows += zip(ends[::2], ends[1::2], strict=True)
    rows.sort()
    met = [begin for begin, _ in rows] + [ranks.stop] == [ranks.start, *(end for _, end in rows)]
    return met and all(begin < end for begin, end in rows)


class Arrival:
    """A receive that can be waited for like a collective: one of gloo completes only in its wait.

    That cannot be interrupted by Ctrl-C, and closes every connection of the group when it times out.

    Args:
        group: Where it comes in.
        index: Position of the rank that sends it.
        work: What the start of the receive returned.
        memory: Where it goes; not all zero in front.
    """

    def __init__(self, group: ControlGroup, index: int, work: dist.Work, memory: bytearray) -> None:
        self.memory = memory
        self.has_begun = False
        self._group = group
        self._index = index
        self._work: dist.Work | None = work
        self._end = time.monotonic() + group.timeout_seconds
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._fault: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether it has begun to arrive, or will not."""
        if self.has_begun or any(self.memory[:HEAD]):
            return True
        if (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + LOOK_SECONDS
        fault = self._group.fault(self._index)
        if fault is None and now >= self._end:
            fault = RuntimeError(f"nothing came from {self._group.name(self._index)}")
        # It may have come before the connection broke.
        self._fault = None if any(self.memory[:HEAD]) else fault
        return self._fault is not None

    def wait(self) -> None:
        """Wait for the rest."""
        if self._fault is not None:
            raise self._fault
        work = self._work
        try:
            if work is not None:
                work.wait(timedelta(seconds=self._group.timeout_seconds))
        finally:
            self._work = None  # a second wait of gloo would never end
