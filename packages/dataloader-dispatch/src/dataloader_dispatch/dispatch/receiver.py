"""The receiving side: receives that are posted ahead, and batches made of what arrives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dataloader_dispatch.batches import Slot, is_immutable, put_together
from dataloader_dispatch.connection import (
    ACKNOWLEDGE_TAG,
    ALIGNMENT,
    DATA_TAG,
    FIRST_CAPACITY,
    HEADER_BYTES,
    U32,
    BatchCodec,
    Connection,
    Kind,
    Layout,
    MessageHeader,
    Record,
    aligned,
    decode_error,
    decode_specs,
    memory_of,
    run_finalizer,
)
from dataloader_dispatch.dispatch.reader import Position, outdated
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, RankFailedError, RankTimeoutError

_DOING = "waiting for a batch"
_LOOK_SECONDS = 0.2
_SHORTEST_PAUSE = 2e-5
_LONGEST_PAUSE = 1e-3
_ACKNOWLEDGE_SECONDS = 1.0
_ROOT = 0
_CPU = torch.device("cpu")
_PINNING = ("cuda", "xpu")
"""Devices to which copies are faster, and continue in the background, from page-locked memory."""
_LASTING = (RankFailedError, RankTimeoutError)
"""What ends every pass, and not only the one in which it is told."""


class Inbox:
    """The stream of records from the root, which comes in messages.

    Args:
        group: The ranks; this one is not the root.
        prefetch: Number of receives that are posted at a time.
        device: Where batches are to be.
        timeout_seconds: How long to wait for one message.
    """

    def __init__(
        self, group: ControlGroup, prefetch: int, device: torch.device, timeout_seconds: float
    ) -> None:
        self._group = group
        self._connection = Connection(group)
        self._timeout_seconds = timeout_seconds
        self._pinned = device.type in _PINNING
        self._posted: deque[tuple[dist.Work, torch.Tensor, memoryview]] = deque()
        self._sequence = 0
        self._message = torch.empty(0, dtype=torch.uint8)
        self._memory = memory_of(self._message)
        self._start = self._end = 0
        self._longest = 0
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._broken: RuntimeError | None = None
        for _ in range(prefetch):
            self._post(FIRST_CAPACITY)

    def read(self, num_bytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """The next bytes, in memory of their own on a device.

        Raises:
            RankFailedError: The root is lost, or its message cannot be read.
            RankTimeoutError: Nothing came within the timeout.
        """
        self._longest = max(self._longest, num_bytes)
        if num_bytes <= self._end - self._start:
            part = self._message[self._start : self._start + num_bytes]
            self._start += num_bytes
            # torch keeps page-locked memory from being used again before a copy in the background has ended.
            return part.to(device, non_blocking=self._pinned, copy=True)
        try:
            whole = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned and device != _CPU)
        except RuntimeError as error:
            raise self.unreadable(error) from error
        filled = 0
        while filled < num_bytes:
            if self._start == self._end:
                self._next_message()
            size = min(num_bytes - filled, self._end - self._start)
            whole[filled : filled + size] = self._message[self._start : self._start + size]
            self._start, filled = self._start + size, filled + size
        return whole.to(device, non_blocking=self._pinned)

    def read_bytes(self, length: int) -> bytes:
        """The next bytes on the host; what aligns those behind them is passed over.

        Raises:
            RankFailedError, RankTimeoutError: As `read`.
        """
        start, num_bytes = self._start, aligned(length)
        if num_bytes > self._end - start:
            return memory_of(self.read(num_bytes))[:length].tobytes()
        self._longest = max(self._longest, num_bytes)
        self._start += num_bytes
        return self._memory[start : start + length].tobytes()

    def unreadable(self, reason: object) -> RankFailedError:
        """The error for a message of the root that cannot be read."""
        return self._group.unreadable(_DOING, _ROOT, reason)

    def acknowledge(self) -> None:
        """Tell the root that it may leave."""
        byte = torch.ones(1, dtype=torch.uint8)
        try:
            self._sent = [(self._connection.send(byte, _ROOT, ACKNOWLEDGE_TAG), byte)]
        except RuntimeError as error:
            self._broken = error

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

    def _next_message(self) -> None:
        if not self._posted:
            raise self._group.lost(_DOING, _ROOT, self._broken) from self._broken
        work, buffer, memory = self._posted[0]
        self._await(memory)
        try:
            # The rest of the message is on its way, unless the root stops in the middle of it.
            work.wait(timedelta(seconds=self._timeout_seconds))
        except RuntimeError as error:
            raise self._group.lost(_DOING, _ROOT, error) from error
        self._posted.popleft()
        self._sequence, num_bytes, capacity = MessageHeader.read(memory)
        if not 0 < num_bytes <= buffer.numel() - HEADER_BYTES:
            raise self.unreadable(f"{num_bytes} bytes in a message of {buffer.numel()}")
        if not FIRST_CAPACITY <= capacity <= max(FIRST_CAPACITY, 8 * self._longest) or capacity % ALIGNMENT:
            raise self.unreadable(f"it asks for a receive of {capacity} bytes")
        try:
            self._post(capacity)
        except RuntimeError as error:
            raise self.unreadable(error) from error
        self._message, self._memory = buffer, memory
        self._start, self._end = HEADER_BYTES, HEADER_BYTES + num_bytes

    def _await(self, memory: memoryview) -> None:
        """Wait until the next message has begun to arrive.

        A wait inside gloo could not be interrupted by Ctrl-C, and closes every connection when it times out.
        """
        start = time.monotonic()
        pause, next_look = _SHORTEST_PAUSE, start + _LOOK_SECONDS

        def has_begun() -> bool:
            return MessageHeader.read(memory).sequence == self._sequence + 1

        while not has_begun():
            if (now := time.monotonic()) >= next_look:
                next_look = now + _LOOK_SECONDS
                error = self._connection.fault(_ROOT)
                if error is not None and not has_begun():
                    raise self._group.lost(_DOING, _ROOT, error) from error
                if now - start >= self._timeout_seconds:
                    raise self._late()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _late(self) -> RankTimeoutError:
        return RankTimeoutError(
            f"{_DOING}: {self._group.name(_ROOT)} sent none for {self._timeout_seconds:g} s, though its "
            "connection is open. Look at what that rank does. If it is only slow, raise timeout_seconds.",
            {self._group.ranks[_ROOT]: self._group.host(_ROOT)},
        )

    def _post(self, capacity: int) -> None:
        """Post a receive, into the message that was read last if it may be used again."""
        if self._broken is not None:
            return
        buffer = self._message
        if self._pinned or buffer.numel() != capacity:
            buffer = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._pinned)
        memory = memory_of(buffer)
        MessageHeader(0, 0, 0).write(memory)
        try:
            self._posted.append((self._connection.receive(buffer, _ROOT, DATA_TAG), buffer, memory))
        except RuntimeError as error:
            self._broken = error  # What has arrived before is still to be delivered.


class Receiver:
    """A rank that receives.

    Args:
        inbox: Records from the root.
        device: Where tensors are to be.
        epoch: The root's at the start.
        codec: Reads the batches.
    """

    def __init__(self, inbox: Inbox, device: torch.device, epoch: int, codec: BatchCodec) -> None:
        self._inbox: Inbox | None = inbox
        self._device = device
        self._codec = codec
        self._structure = b""
        self._slots: list[Slot] = []
        self._skeleton: object = None
        self._immutable = True
        self._layout = Layout([])
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
        return self._number

    def take(self, number: int) -> Any:
        inbox = self._opened()
        if not self._active or number != self._number:
            raise outdated()
        if self._outcome is not None:
            raise self._outcome
        record, value = self._receive(inbox)
        while record.generation < number and not isinstance(value, _LASTING):
            record, value = self._receive(inbox)
        if record.generation > number:
            raise DataError(
                f"this rank begins pass {number} over the data, but the first rank begins pass "
                f"{record.generation}. All ranks must call iter() on the data loader equally often."
            )
        if record.kind != Kind.FAILURE:
            self._epoch, self._progress = record.epoch, record.progress
        if record.kind != Kind.BATCH and isinstance(value, BaseException):
            self._outcome = value
            if isinstance(value, _LASTING):
                self._failed = value
            raise value
        self.is_dummy = record.is_dummy
        return value

    def _receive(self, inbox: Inbox) -> tuple[Record, object]:
        """The next record, and what is in it: a batch, or the end or the failure of a pass."""
        try:
            record = Record.read(inbox.read_bytes(HEADER_BYTES))
            if record.description:
                self._learn(inbox.read_bytes(record.description))
            if record.kind == Kind.BATCH:
                if record.payload != self._layout.num_bytes:
                    raise ValueError(f"a batch of {self._layout.num_bytes} bytes in {record.payload}")
                tensors = self._layout.tensors_in(inbox.read(record.payload, self._device), 0)
                # Values that can be changed are made anew for each batch.
                return record, put_together(self._skeleton if self._immutable else self._decode(), tensors)
            failure = inbox.read_bytes(record.payload)
            inbox.acknowledge()
            return record, StopIteration() if record.kind == Kind.END else decode_error(failure)
        except ValueError as error:
            self._failed = inbox.unreadable(error)
            raise self._failed from error

    def _learn(self, described: bytes) -> None:
        start = U32.size + int.from_bytes(described[: U32.size], "little")
        specs = decode_specs(described[U32.size : start])
        self._structure, self._layout = described[start:], Layout(specs)
        self._slots = [Slot(number) for number in range(len(specs))]
        self._skeleton = self._decode()
        self._immutable = is_immutable(self._skeleton)

    def _decode(self) -> object:
        return self._codec.decode(self._structure, self._slots)

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

    def move(self, _: Callable[[Position], None]) -> None:
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
            raise RuntimeError("the data loader was closed. Make a new one.")
        if self._failed is not None:
            raise self._failed
        return self._inbox
