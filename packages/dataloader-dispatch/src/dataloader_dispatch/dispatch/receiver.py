"""The receiving side: receives that are posted ahead, and batches made of what arrives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dataloader_dispatch.batches import Slot, is_immutable, put_together
from dataloader_dispatch.connection import BatchCodec, Connection, run_finalizer
from dataloader_dispatch.dispatch.message import (
    ACKNOWLEDGE_TAG,
    ALIGNMENT,
    DATA_TAG,
    FIRST_CAPACITY,
    HEADER_BYTES,
    U32,
    Header,
    Kind,
    Layout,
    aligned,
    arrived,
    decode_error,
    decode_specs,
    forget,
    memory_of,
    read_standing,
)
from dataloader_dispatch.dispatch.reader import outdated
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, RankFailedError, RankTimeoutError

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
_PINNING = ("cuda", "xpu")


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
        self, group: ControlGroup, prefetch: int, pinned: bool, timeout_seconds: float, host: str
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


def pins(device: torch.device) -> bool:
    """Whether copies to a device are faster, and can go on in the background, from page-locked memory."""
    return device.type in _PINNING


class Arrived(NamedTuple):
    """A batch, where the loader stands behind it, and whether it fills up a round and counts for nothing."""

    batch: object
    epoch: int
    progress: float
    is_dummy: bool


class Unpacker:
    """Makes batches of messages. No batch shares memory with another one or with a buffer that is used again.

    Args:
        inbox: Where the buffers of messages go back to.
        device: Where the tensors are to be.
        codec: Reads the batches.
    """

    def __init__(self, inbox: Inbox, device: torch.device, codec: BatchCodec) -> None:
        self._inbox = inbox
        self._device = device
        self._codec = codec
        self._structure = b""
        self._slots: list[Slot] = []
        self._skeleton: object = None
        self._immutable = True
        self._layout = Layout([])

    def batches(self, message: Received) -> Iterator[Arrived]:
        """The batches in a message, one at a time; then its buffer is given back.

        Raises:
            ValueError: The message cannot be read.
        """
        header, buffer = message
        memory = memory_of(buffer)
        if header.description:
            self._learn(memory[HEADER_BYTES : HEADER_BYTES + header.description].tobytes())
        start = HEADER_BYTES + aligned(header.description)
        if header.rounds * (HEADER_BYTES + self._layout.num_bytes) != header.payload:
            raise ValueError(f"{header.rounds} batches of {self._layout.num_bytes} bytes in {header.payload}")
        own = header.rounds == 1 and 2 * header.payload >= buffer.numel() and self._device.type == "cpu"
        for _ in range(header.rounds):
            standing = read_standing(memory, start)
            start += HEADER_BYTES
            tensors = self._tensors(buffer, start, own)
            start += self._layout.num_bytes
            yield Arrived(self._assembled(tensors), *standing)
        if not own:
            self._inbox.give_back(buffer, self._copied(buffer))

    def _learn(self, described: bytes) -> None:
        start = U32.size + int.from_bytes(described[: U32.size], "little")
        specs = decode_specs(described[U32.size : start])
        self._structure, self._layout = described[start:], Layout(specs)
        self._slots = [Slot(number) for number in range(len(specs))]
        self._skeleton = self._read()
        # Values that can be changed are made anew for each batch.
        self._immutable = is_immutable(self._skeleton)

    def _read(self) -> object:
        return self._codec.decode(self._structure, self._slots)

    def _assembled(self, tensors: list[torch.Tensor]) -> object:
        return put_together(self._skeleton if self._immutable else self._read(), tensors)

    def _tensors(self, buffer: torch.Tensor, start: int, own: bool) -> list[torch.Tensor]:
        """The tensors of one batch: in the buffer itself if the batch may keep it, else in one copy."""
        if own:
            return self._layout.tensors_in(buffer, start)
        part = buffer[start : start + self._layout.num_bytes]
        if self._device.type == "cpu":
            return self._layout.tensors_in(part.clone(), 0)
        # The buffer of a copy that goes on in the background is not used before it has ended.
        return self._layout.tensors_in(part.to(self._device, non_blocking=buffer.is_pinned()), 0)

    def _copied(self, buffer: torch.Tensor) -> torch.Event | None:
        if not buffer.is_pinned():
            return None
        event = torch.Event(self._device)
        event.record()
        return event


class Receiver:
    """A rank that receives.

    Args:
        inbox: Messages from the root.
        device: Where tensors are to be.
        epoch: The root's at the start.
        codec: Reads the batches.
    """

    def __init__(self, inbox: Inbox, device: torch.device, epoch: int, codec: BatchCodec) -> None:
        self._inbox: Inbox | None = inbox
        self._unpacker = Unpacker(inbox, device, codec)
        self._arrived: Iterator[Arrived] = iter(())
        self._number = 0
        self._active = False
        self._outcome: BaseException | None = None
        self._failed: BaseException | None = None
        self._epoch = epoch
        self._progress = 0.0
        self.is_dummy = False

    def start_pass(self) -> int:
        self._opened()
        self._number += 1
        self._active, self._outcome, self.is_dummy = True, None, False
        self._arrived = iter(())
        return self._number

    def take(self, number: int) -> Any:
        inbox = self._opened()
        if not self._active or number != self._number:
            raise outdated()
        if self._outcome is not None:
            raise self._outcome
        while (arrived := self._unpacked(inbox)) is None:
            self._receive(inbox, number)
        self._epoch, self._progress, self.is_dummy = arrived.epoch, arrived.progress, arrived.is_dummy
        return arrived.batch

    def _unpacked(self, inbox: Inbox) -> Arrived | None:
        try:
            return next(self._arrived, None)
        except ValueError as error:
            self._failed = inbox.unreadable(error)
            raise self._failed from error

    def _receive(self, inbox: Inbox, number: int) -> None:
        while (message := inbox.take()).header.generation < number:
            inbox.give_back(message.buffer)
        header = message.header
        if header.generation > number:
            raise DataError(
                f"this rank begins pass {number} over the data and the first rank pass {header.generation}; "
                "all ranks must call iter() on the data loader equally often"
            )
        if header.kind == Kind.FAILURE:
            payload = memory_of(message.buffer)[HEADER_BYTES : HEADER_BYTES + header.payload].tobytes()
            try:
                self._outcome = decode_error(payload)
            except ValueError as error:
                self._outcome = inbox.unreadable(error)
            if isinstance(self._outcome, RankFailedError | RankTimeoutError):
                self._failed = self._outcome
            raise self._outcome
        if header.kind == Kind.END:
            self._epoch, self._progress = header.epoch, header.progress
            self._outcome = StopIteration()
            raise self._outcome
        self._arrived = self._unpacker.batches(message)

    def epoch(self) -> int:
        return self._epoch

    def progress(self) -> float:
        return self._progress

    def set_epoch(self, epoch: int) -> None:
        self._opened()
        self._active = False
        if epoch != self._epoch:
            self._epoch, self._progress = epoch, 0.0

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._opened()
        self._active = False

    def load_resharded(self, states: Sequence[Mapping[str, object]]) -> None:
        self._opened()
        self._active = False

    def end_workers(self) -> None:
        self._active = False

    def close(self) -> None:
        if self._inbox is not None:
            run_finalizer(self._inbox.close)
        self._inbox = None

    def _opened(self) -> Inbox:
        if self._inbox is None:
            raise RuntimeError("the data loader was closed; make a new one")
        if self._failed is not None:
            raise self._failed
        return self._inbox
