"""What each rank has sent and received, while all of them are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.testing._internal.distributed.multi_threaded_pg import WorldData


@dataclass
class Counts:
    """What one rank has sent and received, since the start of a phase.

    Attributes:
        messages: Messages between ranks that it sent or received, and its requests to the store.
        num_bytes: Their bytes, without headers of the transport.
        sent: Messages that it sent to other ranks; their mean where gloo gives ranks unequal shares.
        rounds: Messages that had to follow one another, on the longest way through the exchanges of groups.
        requests: Requests to the store, apart from those that ask again and again.
        request_bytes: Keys and values of these.
        polls: Requests whose number depends on how long it waited.
        poll_bytes: Their keys.
    """

    messages: float = 0
    num_bytes: float = 0
    sent: float = 0
    rounds: int = 0
    requests: int = 0
    request_bytes: int = 0
    polls: int = 0
    poll_bytes: int = 0

    def add(self, messages: float, num_bytes: float, sent: float = 0) -> None:
        """Count messages between ranks."""
        self.messages += messages
        self.num_bytes += num_bytes
        self.sent += sent

    def request(self, num_bytes: int, number: int = 1) -> None:
        """Count requests to the store."""
        self.add(number, num_bytes)
        self.requests += number
        self.request_bytes += num_bytes


@dataclass
class RankSlot:
    """What belongs to one rank of those in this process.

    Attributes:
        rank: Its number.
        counts: What it has sent in this phase.
        world: What `torch.distributed` knows of its groups.
        coordinator: What `dist_env` shares with the default group.
        is_paused: Whether nothing is counted at the moment.
        held: What has to live as long as the job.
    """

    rank: int
    counts: Counts = field(default_factory=Counts)
    world: Any = field(default_factory=lambda: WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, []))
    coordinator: Any = None
    is_paused: bool = False
    held: list[object] = field(default_factory=list)


here = threading.local()
"""Its `slot` is that of the rank that the calling thread belongs to."""


def own_slot() -> RankSlot:
    """The rank that the calling thread belongs to."""
    slot: RankSlot = here.slot
    return slot


def total(counts: Sequence[Counts]) -> tuple[int, int]:
    """Requests to the store of all ranks, and their bytes: what the holder of the store handles."""
    return sum(each.requests for each in counts), sum(each.request_bytes for each in counts)
