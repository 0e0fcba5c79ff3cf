"""One stream of messages of the sending side, and the buffers that it uses again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataloader_dispatch.batch_codec import BatchCodec
from dataloader_dispatch.dispatch.layout import Layout, aligned, encode_specs, spec_of
from dataloader_dispatch.dispatch.message import (
    FIRST_CAPACITY,
    HEADER_BYTES,
    U32,
    Header,
    Kind,
    memory_of,
    write_standing,
)

UNDER_WAY = 2
"""Messages whose sends need not have ended: one travels while the next is packed."""
_GROWTH = 1.25

Transfer = tuple[int, dist.Work, torch.Tensor]
"""A rank of the group, a send to it or a receive from it, and the memory that it uses."""


class Stamp(NamedTuple):
    """What a message tells of the pass: its number, where the loader stands behind a round, and how many
    batches of the round are real; the others fill it up."""

    generation: int
    epoch: int
    progress: float
    real: int = 0


class Packed(NamedTuple):
    """Batches of one description, without their containers."""

    described: bytes
    stamps: list[Stamp]
    tensors: list[list[torch.Tensor]]


class Lane:
    """What goes to all ranks with the same share: the same messages in the same order.

    Args:
        destinations: Positions of these ranks in the group.
        prefetch: Receives that each has posted.
    """

    def __init__(self, destinations: list[int], prefetch: int) -> None:
        self.destinations = destinations
        self._parcels = deque(Parcel() for _ in range(UNDER_WAY))
        self._sequence = 0
        self._capacity = FIRST_CAPACITY
        self._capacities = deque([FIRST_CAPACITY] * prefetch)
        self._known = (0, b"")

    def next_parcel(self) -> Parcel:
        """The buffer that was used longest ago; its sends may not have ended."""
        self._parcels.rotate(-1)
        return self._parcels[-1]

    def is_news(self, packed: Packed) -> bool:
        """Whether the description is another than that of the batch before. It is known afterwards."""
        before, self._known = self._known, (packed.stamps[0].generation, packed.described)
        return before != self._known

    def pieces(self, parcel: Parcel, kind: Kind, stamp: Stamp) -> list[torch.Tensor]:
        """The buffers to send: one, or more where the receives that are posted are too small for it."""
        total = HEADER_BYTES + aligned(parcel.description) + parcel.payload
        if total > self._capacity:
            first = self._capacity == FIRST_CAPACITY
            self._capacity = aligned(total if first else int(total * _GROWTH))
        sent = min(total, self._head(parcel, kind, stamp))
        pieces = [parcel.message(sent)]
        while sent < total:
            rest = parcel.buffer[sent : min(sent + self._capacities[0] - HEADER_BYTES, total)]
            piece = Parcel()
            piece.fill(memory_of(rest))
            self._head(piece, Kind.MORE, stamp)
            pieces.append(piece.message(HEADER_BYTES + rest.numel()))
            sent += rest.numel()
        return pieces

    def _head(self, parcel: Parcel, kind: Kind, stamp: Stamp) -> int:
        """Write the header, and return how much the receive takes that the parcel goes to."""
        self._sequence += 1
        self._capacities.append(self._capacity)
        Header(
            self._sequence,
            kind,
            stamp.generation,
            parcel.description,
            parcel.payload,
            self._capacity,
            stamp.epoch,
            stamp.progress,
            parcel.rounds,
        ).write(parcel.memory)
        return self._capacities.popleft()


class Parcel:
    """A message in a buffer that is used again once every send of it has ended."""

    def __init__(self) -> None:
        self.sends: list[Transfer] = []
        self.description = 0
        self.payload = 0
        self.rounds = 0
        self._layout = Layout([])
        self._described = b""
        self._start = 0
        self._views: list[list[torch.Tensor]] = []
        self._whole = torch.empty(0)
        self._grow(HEADER_BYTES)

    def message(self, num_bytes: int) -> torch.Tensor:
        """The beginning of the buffer."""
        if self._whole.numel() != num_bytes:
            self._whole = self.buffer[:num_bytes]
        return self._whole

    def fill(self, payload: bytes | memoryview) -> None:
        """Make it a message without tensors."""
        self._grow(HEADER_BYTES + len(payload))
        self.memory[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        self.payload = len(payload)

    def pack(self, packed: Packed, share: int, news: bool) -> None:
        """Make it a message of the batches at one position of their rounds, with their description if that
        is news."""
        described = packed.described
        if described != self._described:
            self._layout, self._described, self._views = Layout(spec_of(packed.tensors[0])), described, []
        self.description = len(described) if news else 0
        self.rounds = len(packed.tensors)
        stride = HEADER_BYTES + self._layout.num_bytes
        self.payload = self.rounds * stride
        start = HEADER_BYTES + aligned(self.description)
        if self.buffer.numel() < start + self.payload:
            self._grow(start + self.payload)
        if news:
            self.memory[HEADER_BYTES : HEADER_BYTES + len(described)] = described
        if start != self._start:
            self._views, self._start = [], start
        with torch.no_grad():
            for number, (stamp, tensors) in enumerate(zip(packed.stamps, packed.tensors, strict=True)):
                place = start + number * stride
                write_standing(self.memory, place, stamp.epoch, stamp.progress, share >= stamp.real)
                if number == len(self._views):
                    self._views.append(self._layout.tensors_in(self.buffer, place + HEADER_BYTES))
                for view, tensor in zip(self._views[number], tensors, strict=True):
                    view.copy_(tensor)

    def _grow(self, num_bytes: int) -> None:
        self.buffer = torch.empty(aligned(num_bytes), dtype=torch.uint8)
        self.memory = memory_of(self.buffer)
        self._views = []
        self._whole = self.buffer


def packed_alike(batches: Sequence[object], stamps: Sequence[Stamp], codec: BatchCodec) -> Iterator[Packed]:
    """Batches in their order, those together that follow one another and have one description.

    Raises:
        DataError: A value in a batch cannot be sent.
    """
    group: Packed | None = None
    for batch, stamp in zip(batches, stamps, strict=True):
        tensors: list[torch.Tensor] = []
        structure = codec.encode(batch, tensors)
        specs = encode_specs(spec_of(tensors))
        described = b"".join((U32.pack(len(specs)), specs, structure))
        if group is not None and group.described == described:
            group.stamps.append(stamp)
            group.tensors.append(tensors)
            continue
        if group is not None:
            yield group
        group = Packed(described, [stamp], [tensors])
    if group is not None:
        yield group
