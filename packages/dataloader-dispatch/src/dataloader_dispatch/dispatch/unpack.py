"""From a received message to a batch on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from dataloader_dispatch.batch_codec import BatchCodec
from dataloader_dispatch.dispatch.inbox import Inbox, Received
from dataloader_dispatch.dispatch.layout import Layout, aligned, decode_specs
from dataloader_dispatch.dispatch.message import HEADER_BYTES, U32, memory_of, read_standing
from dataloader_dispatch.dispatch.structure import Slot, is_immutable, map_tensors, put_together

_PINNING = ("cuda", "xpu")


def pins(device: torch.device) -> bool:
    """Whether copies to a device are faster, and can go on in the background, from page-locked memory."""
    return device.type in _PINNING


def moved(batch: object, device: torch.device) -> object:
    """A batch with its dense tensors on a device and detached."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, non_blocking=True)

    return map_tensors(batch, move)


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
