"""The receiving side: receives that are posted ahead, into buffers that are used again."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataloader_dispatch.dispatch.connection import Connection
from dataloader_dispatch.dispatch.layout import ALIGNMENT, aligned
from dataloader_dispatch.dispatch.message import (
    ACKNOWLEDGE_TAG,
    DATA_TAG,
    FIRST_CAPACITY,
    HEADER_BYTES,
    Header,
    Kind,
    arrived,
    forget,
    memory_of,
)
from dataloader_dispatch.rank_group import RankGroup
from dist_env import RankFailedError, RankTimeoutError

DOING = "waiting for a batch"

_LOOK_SECONDS = 0.2
_SHORTEST_PAUSE = 2e-5
_LONGEST_PAUSE = 1e-3
_ACKNOWLEDGE_SECONDS = 1.0
_ROOT = 0
_BEGINNINGS = (Kind.BATCH, Kind.END, Kind.FAILURE)
_IMPOSSIBLE = 1 << 56
_SPARE = 2
"""Pinned buffers beyond those that receives are posted for, so that a copy may still read from them."""


class Received(NamedTuple):
    """A message and the buffer that holds all of it."""

    header: Header
    buffer: torch.Tensor


class Inbox:
    """Messages from the root, in their order.

    Args:
        group: The ranks; this one is not the root.
        prefetch: Number of receives that are posted at a time.
        pinned: Receive into page-locked memory.
        timeout_seconds: How long to wait for one message.
        host: Host of the root, for messages.
    """

    def __init__(
        self, group: RankGroup, prefetch: int, pinned: bool, timeout_seconds: float, host: str
    ) -> None:
        self._group = group
        self._connection = Connection(group)
        self._timeout_seconds = timeout_seconds
        self._host = host
        self._buffers = _Buffers(pinned, prefetch + _SPARE)
        self._posted: deque[tuple[dist.Work, torch.Tensor, memoryview]] = deque()
        self._sequence = 0
        self._longest = 0
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._broken: RuntimeError | None = None
        for _ in range(prefetch):
            self._post(FIRST_CAPACITY)

    def take(self) -> Received:
        """The next message. Its buffer belongs to the caller, who may `give_back` it.

        Raises:
            RankFailedError: The root is lost.
            RankTimeoutError: Nothing came within the timeout.
        """
        header, buffer = self._next()
        total = HEADER_BYTES + aligned(header.description) + header.payload
        self._longest = max(self._longest, total)
        if header.kind not in _BEGINNINGS or total >= _IMPOSSIBLE:
            raise self.unreadable(f"it is of the kind {header.kind} and has {total} bytes")
        self._post_for(header)
        if total > buffer.numel():
            buffer = self._rest_of(buffer, total)
        if header.kind in (Kind.END, Kind.FAILURE):
            self._acknowledge()
        return Received(header, buffer)

    def unreadable(self, reason: object) -> RankFailedError:
        """The error for a message of the root that cannot be read."""
        return self._group.unreadable(DOING, _ROOT, reason)

    def give_back(self, buffer: torch.Tensor, event: torch.Event | None = None) -> None:
        """Let a buffer be used again, once ``event`` has happened."""
        self._buffers.give_back(buffer, event)

    def close(self) -> None:
        """Let go of all that keeps the connection open, once the root can know that it may leave."""
        for work, _ in self._sent:
            try:
                work.wait(timedelta(seconds=_ACKNOWLEDGE_SECONDS))
            except RuntimeError as error:
                self._broken = error  # The root has left, or does not wait for it.
        self._sent.clear()
        self._posted.clear()
        self._connection.cut([_ROOT])

    def _next(self) -> tuple[Header, torch.Tensor]:
        if not self._posted:
            raise self._group.lost(DOING, _ROOT, self._broken) from self._broken
        work, buffer, memory = self._posted[0]
        self._await(memory, self._sequence + 1)
        try:
            # The rest of the message is on its way, unless the root stops in the middle of it.
            work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._group.lost(DOING, _ROOT, error) from error
        self._posted.popleft()
        self._sequence += 1
        return Header.read(memory), buffer

    def _await(self, memory: memoryview, sequence: int) -> None:
        """Wait until a message has begun to arrive.

        A wait inside gloo could not be interrupted by Ctrl-C, and closes every connection when it times out.
        """
        start = time.monotonic()
        pause, next_look = _SHORTEST_PAUSE, start + _LOOK_SECONDS
        while not arrived(memory, sequence):
            if (now := time.monotonic()) >= next_look:
                next_look = now + _LOOK_SECONDS
                error = self._connection.fault(_ROOT)
                if error is not None and not arrived(memory, sequence):
                    raise self._group.lost(DOING, _ROOT, error) from error
                if now - start >= self._timeout_seconds:
                    raise self._late()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _late(self) -> RankTimeoutError:
        root = self._group.ranks[_ROOT]
        return RankTimeoutError(
            f"{DOING}: {self._group.name(_ROOT)} sent none for {self._timeout_seconds:g} s, though its "
            "connection is open. Look at what that rank does; if it is only slow, raise timeout_seconds",
            {root: self._host},
        )

    def _rest_of(self, buffer: torch.Tensor, total: int) -> torch.Tensor:
        """A message that is longer than one receive, in a buffer of its own."""
        try:
            whole = torch.empty(aligned(total), dtype=torch.uint8)
        except RuntimeError as error:
            raise self.unreadable(error) from error
        whole[: buffer.numel()] = buffer
        filled = buffer.numel()
        while filled < total:
            header, piece = self._next()
            longest = min(total - filled, piece.numel() - HEADER_BYTES)
            if header.kind != Kind.MORE or not 0 < header.payload <= longest:
                raise self.unreadable(f"{header.payload} bytes of the kind {header.kind} continue it")
            self._post_for(header)
            whole[filled : filled + header.payload] = piece[HEADER_BYTES : HEADER_BYTES + header.payload]
            filled += header.payload
        return whole

    def _post_for(self, header: Header) -> None:
        """Post the receive that a message asks for, which is not much longer than messages are."""
        most = max(FIRST_CAPACITY, 2 * aligned(self._longest))
        if not FIRST_CAPACITY <= header.capacity <= most or header.capacity % ALIGNMENT:
            raise self.unreadable(f"it asks for a receive of {header.capacity} bytes")
        try:
            self._post(header.capacity)
        except RuntimeError as error:
            raise self.unreadable(error) from error

    def _post(self, capacity: int) -> None:
        if self._broken is not None:
            return
        buffer = self._buffers.get(capacity)
        memory = memory_of(buffer)
        forget(memory)
        try:
            self._posted.append((self._connection.receive(buffer, _ROOT, DATA_TAG), buffer, memory))
        except RuntimeError as error:
            self._broken = error  # What has arrived before is still to be delivered.

    def _acknowledge(self) -> None:
        """Tell the root that it may leave."""
        byte = torch.ones(1, dtype=torch.uint8)
        try:
            self._sent = [(self._connection.send(byte, _ROOT, ACKNOWLEDGE_TAG), byte)]
        except RuntimeError as error:
            self._broken = error


class _Buffers:
    """Buffers to receive into."""

    def __init__(self, pinned: bool, limit: int) -> None:
        self._pinned = pinned
        self._limit = limit
        self._made = 0
        self._free: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def get(self, capacity: int) -> torch.Tensor:
        while self._free:
            buffer, event = self._free[0]
            if buffer.numel() == capacity:
                if event is None or event.query():
                    self._free.popleft()
                    return buffer
                if self._made < self._limit:
                    break
                event.synchronize()
            else:
                # Freed memory that a copy still reads is not handed out again before the copy ends.
                self._free.popleft()
                self._made -= 1
        self._made += 1
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor, event: torch.Event | None) -> None:
        self._free.append((buffer, event))
