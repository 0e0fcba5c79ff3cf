"""The exchanges of a gloo group among threads of one process, over memory."""

from __future__ import annotations

import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from _scale_counts import own_slot

WAIT_SECONDS = 0.05
_LOCKS = 256
_ADDRESS_BYTES = 152
"""What gloo of torch 2.13 tells the others of a rank, beside the name of its host."""


class _Work:
    """An exchange over memory. The last rank that comes ends it for all."""

    def __init__(self, done: threading.Event, take: Callable[[], None] | None = None) -> None:
        self._done = done
        self._take = take

    def is_completed(self) -> bool:
        # Waits a moment: a thousand threads that ask all the time would leave none of them the processor.
        return self._done.wait(WAIT_SECONDS)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("[memory/gloo/pair.cc:1] Timed out waiting for an exchange")
        if self._take is not None:
            take, self._take = self._take, None
            take()
        return True


class _Exchange:
    """One collective: what each rank gave."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.missing = size
        self.done = threading.Event()
        self.result: Any = None


class _Switch:
    """What the ranks of one group share over memory."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        # Of two ranks each, so that a thousand threads do not queue for one.
        self.locks = [threading.Lock() for _ in range(_LOCKS)]
        self.size = size
        self.exchanges: dict[int, _Exchange] = defaultdict(lambda: _Exchange(size))
        self.sends: dict[tuple[int, int, int], list[tuple[torch.Tensor, threading.Event]]] = defaultdict(list)
        self.receives: dict[tuple[int, int, int], list[tuple[torch.Tensor, threading.Event]]] = defaultdict(
            list
        )

    def meet(self, number: int, index: int, value: Any, end: Callable[[list[Any]], Any]) -> _Exchange:
        with self.lock:
            exchange = self.exchanges[number]
            exchange.given[index] = value
            exchange.missing -= 1
            if not exchange.missing:
                exchange.result = end(exchange.given)
                del self.exchanges[number]
                exchange.done.set()
        return exchange


_switches: dict[str, _Switch] = {}
_switches_lock = threading.Lock()


class MemoryGroup:
    """The exchanges of a gloo group among threads, over memory.

    Args:
        store: Where the ranks of the group meet.
        index: Position of this rank.
        size: Number of ranks.
    """

    def __init__(self, store: Any, index: int, size: int, *, connects_to_all: bool) -> None:
        self._index = index
        self._store = store
        self._met = set(range(size)) if connects_to_all else {index}
        self._number = 0
        slot = own_slot()
        slot.is_paused = True
        name = store.compare_set("switch", "", uuid.uuid4().hex).decode()
        slot.is_paused = False
        with _switches_lock:
            self._switch = _switches.setdefault(name, _Switch(size))
        if connects_to_all:
            tell_addresses(store, index, size)
        else:
            store.set(f"0/{index}", bytes(_ADDRESS_BYTES + len(socket.gethostname())))

    def connect(self, others: Iterable[int]) -> None:
        """Ask for the addresses of those that were not met before, as gloo of torch 2.13 does."""
        for other in set(others) - self._met:
            self._met.add(other)
            self._store.wait([f"0/{other}"])
            self._store.get(f"0/{other}")

    def _meet(self, value: Any, end: Callable[[list[Any]], Any], take: Any = None) -> _Work:
        number, self._number = self._number, self._number + 1
        exchange = self._switch.meet(number, self._index, value, end)
        return _Work(exchange.done, None if take is None else lambda: take(exchange.result))

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> _Work:
        received, own = outputs[0], inputs[0]

        def take(values: list[torch.Tensor]) -> None:
            for target, value in zip(received, values, strict=True):
                target.copy_(value)

        return self._meet(own.clone(), lambda given: given, take)

    def allreduce(self, tensors: Any, options: Any) -> _Work:
        tensor = tensors[0]
        self.connect(((self._index + 1) % self._switch.size, (self._index - 1) % self._switch.size))
        return self._meet(tensor.clone(), lambda given: torch.stack(given).amax(0), tensor.copy_)

    def broadcast(self, tensors: Any, options: Any) -> _Work:
        tensor, root = tensors[0], options.rootRank
        size, position = self._switch.size, (self._index - options.rootRank) % self._switch.size
        above = [position - (1 << position.bit_length() >> 1)] if position else []
        below = [position + (1 << bit) for bit in range(position.bit_length(), size.bit_length())]
        self.connect((each + root) % size for each in (*above, *below) if each < size)
        return self._meet(tensor.clone(), lambda given: given[root], tensor.copy_)

    def send(self, tensors: Any, index: int, tag: int) -> _Work:
        return self._pair((self._index, index, tag), tensors[0], is_send=True)

    def recv(self, tensors: Any, index: int, tag: int) -> _Work:
        return self._pair((index, self._index, tag), tensors[0], is_send=False)

    def _pair(self, key: tuple[int, int, int], buffer: torch.Tensor, *, is_send: bool) -> _Work:
        switch, done = self._switch, threading.Event()
        self.connect({key[0], key[1]})
        own, others = (switch.sends, switch.receives) if is_send else (switch.receives, switch.sends)
        with switch.locks[hash(key) % _LOCKS]:
            if others[key]:
                other, ended = others[key].pop(0)
                source, target = (buffer, other) if is_send else (other, buffer)
                # From behind, so that the number in front, which tells that it is there, comes last.
                flat = source.reshape(-1)
                target.reshape(-1)[8 : len(flat)] = flat[8:]
                target.reshape(-1)[:8] = flat[:8]
                done.set()
                ended.set()
            else:
                own[key].append((buffer, done))
        return _Work(done)


def tell_addresses(store: Any, index: int, size: int) -> None:
    """What a gloo group of torch 2.13 asks of the store while it is made.

    Each rank tells one address for each of the others, and reads what all ranks, itself too, have told.
    """
    slot = own_slot()
    told = _ADDRESS_BYTES + len(socket.gethostname()) + 8 * size
    before = slot.counts.request_bytes
    store.set(f"0/{index}", bytes(told))
    prefix = slot.counts.request_bytes - before - told - len(str(index))
    keys = size * prefix + sum(len(str(rank)) for rank in range(size))
    slot.counts.request(2 * keys + size * told, 2 * size)  # waits, and then reads


def forget_groups() -> None:
    """Let go of all groups, which no thread uses any more."""
    _switches.clear()
