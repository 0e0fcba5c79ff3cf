"""The sending side: who gets which batch, how batches are packed, and how they reach every rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch.connection import (
    ACKNOWLEDGE_TAG,
    DATA_TAG,
    FIRST_CAPACITY,
    HEADER_BYTES,
    BatchCodec,
    Connection,
    Kind,
    Layout,
    MessageHeader,
    Record,
    aligned,
    described,
    memory_of,
    spec_of,
)
from dataloader_dispatch.dispatch.reader import Round, Snapshot
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup

DataDimension = int | str | tuple[int | str, ...] | None
"""Index or name of the data-parallel dimension of a mesh; several of them, outermost first; or None."""

Transfer = tuple[int, dist.Work, torch.Tensor]
"""A rank of the group, a send to it or a receive from it, and the memory that it uses."""

_UNLIMITED = timedelta(days=365)
"""Whoever waits for this rank counts the time; the others may rightly pause for an evaluation."""


@dataclass(frozen=True)
class Placement:
    """The ranks of a mesh and the batch that each gets.

    Attributes:
        ranks: Global ranks; the first is the root, which loads.
        shares: For each of ``ranks``, the position of its batch in a round. Ranks that differ only along
            other dimensions of the mesh have the same.
        width: Number of batches in a round: the product of the data-parallel dimensions, 1 without one.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_mesh_dim: DataDimension) -> Placement:
        """The placement on a mesh; that of this process alone without one.

        Raises:
            DataError: The mesh has no such dimension.
        """
        if mesh is None:
            here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            return cls((here,), (0,), 1)
        ranks, strides, width = mesh.mesh, [], 1
        for dimension in reversed(_dimensions(mesh, dp_mesh_dim)):
            strides.append((ranks[(0,) * (dimension + 1)].numel(), ranks.shape[dimension], width))
            width *= ranks.shape[dimension]
        shares = tuple(
            sum(position // below % size * weight for below, size, weight in strides)
            for position in range(ranks.numel())
        )
        return cls(tuple(ranks.flatten().tolist()), shares, width)


def _dimensions(mesh: DeviceMesh, dp_mesh_dim: DataDimension) -> list[int]:
    """Indices of the data-parallel dimensions, outermost first."""
    if dp_mesh_dim is None:
        return []
    given = dp_mesh_dim if isinstance(dp_mesh_dim, tuple) else (dp_mesh_dim,)
    found = [_dimension(mesh, each) for each in given]
    if sorted(set(found)) != found:
        raise DataError(
            f"dp_mesh_dim={dp_mesh_dim!r} must name each dimension once, in the order that the mesh has them."
        )
    return found


def _dimension(mesh: DeviceMesh, dp_mesh_dim: int | str) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(dp_mesh_dim, str) and dp_mesh_dim in names:
        return names.index(dp_mesh_dim)
    if type(dp_mesh_dim) is int and 0 <= dp_mesh_dim < mesh.ndim:
        return dp_mesh_dim
    known = f", called {', '.join(map(repr, names))}" if names else ", which have no names"
    raise DataError(
        f"dp_mesh_dim={dp_mesh_dim!r} is not a dimension of the mesh, which has the dimensions 0 to "
        f"{mesh.ndim - 1}{known}. Give one of these, or None to send every rank the same batches."
    )


class Packed(NamedTuple):
    """A batch without its containers: what describes it, and its tensors."""

    described: bytes
    layout: Layout
    tensors: list[torch.Tensor]


class SendBuffer:
    """A message in the making. It is used again once every send of it has ended."""

    def __init__(self) -> None:
        self.sends: list[Transfer] = []
        self.filled = HEADER_BYTES
        self.data = torch.empty(FIRST_CAPACITY, dtype=torch.uint8)
        self.memory = memory_of(self.data)
        self._layout: Layout | None = None
        self._views: dict[int, list[torch.Tensor]] = {}

    def append_bytes(self, data: bytes) -> None:
        """Append some bytes, and what aligns what follows."""
        self._grow(aligned(len(data)))
        self.memory[self.filled : self.filled + len(data)] = data
        self.filled += aligned(len(data))

    def append_batch(self, record: Record, packed: Packed) -> None:
        """Append a batch, with its description if the record says so."""
        self._grow(record.total)
        record.write(self.memory, self.filled)
        self.filled += HEADER_BYTES
        if record.description:
            self.append_bytes(packed.described)
        if packed.layout is not self._layout:
            self._layout, self._views = packed.layout, {}
        if (views := self._views.get(self.filled)) is None:
            views = self._views[self.filled] = packed.layout.tensors_in(self.data, self.filled)
        with torch.no_grad():
            for view, tensor in zip(views, packed.tensors, strict=True):
                view.copy_(tensor)
        self.filled += record.payload

    def _grow(self, num_bytes: int) -> None:
        if self.filled + num_bytes > self.data.numel():
            grown = torch.empty(2 * (self.filled + num_bytes), dtype=torch.uint8)
            grown[: self.filled] = self.data[: self.filled]
            self.data, self.memory, self._views = grown, memory_of(grown), {}


class SendQueue:
    """What goes to all ranks with the same share: the same messages in the same order.

    Args:
        share: Position of their batch in a round.
        destinations: Positions of these ranks in the group.
        prefetch: Receives that each has posted.

    Attributes:
        buffer: The message in the making.
    """

    def __init__(self, share: int, destinations: list[int], prefetch: int) -> None:
        self.share = share
        self.destinations = destinations
        self.buffer = SendBuffer()
        self._under_way = SendBuffer()
        self._sequence = 0
        self._capacity = FIRST_CAPACITY
        self._capacities = deque([FIRST_CAPACITY] * prefetch)
        self._described = b""

    def has_room(self, packed: Packed) -> bool:
        """Whether a batch fits into the message that is being made, or would be the first in it."""
        most = Record(Kind.BATCH, 0, len(packed.described), packed.layout.num_bytes).total
        return self.buffer.filled + most <= self._capacities[0] or self.buffer.filled == HEADER_BYTES

    def append(self, generation: int, taken: Round, packed: Packed) -> None:
        """Append a batch to the message, with its description if that is another than before."""
        described = 0 if packed.described == self._described else len(packed.described)
        self._described = packed.described
        after, is_dummy = taken.after, self.share >= taken.real
        size = packed.layout.num_bytes
        record = Record(Kind.BATCH, generation, described, size, after.epoch, after.progress, is_dummy)
        self.buffer.append_batch(record, packed)

    def take_back(self, filled: int) -> None:
        """Let the message end where it ended before the last batch."""
        self.buffer.filled, self._described = filled, b""

    def next_buffer(self) -> None:
        """Begin another message, in the buffer that was used longest ago; its sends may not have ended."""
        self.buffer, self._under_way = self._under_way, self.buffer
        self.buffer.filled = HEADER_BYTES

    def messages(self, buffer: SendBuffer) -> list[torch.Tensor]:
        """What to send: one message, or more where the receives that are posted are too small for it."""
        pieces, start = [], HEADER_BYTES
        while start < buffer.filled:
            size = min(self._capacities.popleft() - HEADER_BYTES, buffer.filled - start)
            self._capacities.append(self._capacity)
            self._sequence += 1
            piece = buffer.data[: HEADER_BYTES + size]
            if start > HEADER_BYTES:
                piece = torch.empty(HEADER_BYTES + size, dtype=torch.uint8)
                piece[HEADER_BYTES:] = buffer.data[start : start + size]
            MessageHeader(self._sequence, size, self._capacity).write(memory_of(piece))
            pieces.append(piece)
            start += size
        # The next message asks for it: the receiver has seen by then how long records are.
        self._capacity = max(self._capacity, 1 << (buffer.filled - 1).bit_length())
        return pieces


class LostRank(Exception):  # not an error of its own: what becomes one on every rank
    """A destination cannot be reached.

    Args:
        index: Its position in the group.
        reason: What its connection said.
    """

    def __init__(self, index: int, reason: RuntimeError) -> None:
        super().__init__(index, reason)
        self.index = index
        self.reason = reason


class Outbox:
    """Sends batches. One thread packs; `send_failure` and `unreachable` may come from another.

    Args:
        group: The ranks; this one is the root.
        placement: Who gets which batch.
        prefetch: Receives that every destination has posted.
        codec: Writes the batches.

    Attributes:
        waiting_for: Position of the rank whose receives the sending thread waits for.
    """

    def __init__(self, group: ControlGroup, placement: Placement, prefetch: int, codec: BatchCodec) -> None:
        self._codec = codec
        self._connection = Connection(group)
        others = list(enumerate(placement.shares))[1:]
        shares = {share: [i for i, other in others if other == share] for share in range(placement.width)}
        self._queues = [SendQueue(share, to, prefetch) for share, to in shares.items() if to]
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._finals: list[SendBuffer] = []
        self._acknowledgements: list[Transfer] = []
        self.waiting_for: int | None = None

    def pack(self, batches: Sequence[object]) -> list[Packed]:
        """The batches of a round that go to other ranks, ready to be sent.

        Raises:
            DataError: A batch cannot be sent.
        """
        return [self._packed(batches[queue.share]) for queue in self._queues]

    def has_room(self, packed: Sequence[Packed]) -> bool:
        """Whether a round can travel together with those appended before it."""
        return all(queue.has_room(each) for queue, each in zip(self._queues, packed, strict=True))

    def append(self, generation: int, taken: Round, packed: Sequence[Packed]) -> None:
        """Put a round into the messages that `flush` sends, waiting for who is too far behind.

        Raises:
            LostRank: A destination cannot be reached.
        """
        for queue in self._queues:
            self._wait(queue.buffer.sends)
            queue.buffer.sends.clear()
        filled = [queue.buffer.filled for queue in self._queues]
        try:
            for queue, each in zip(self._queues, packed, strict=True):
                queue.append(generation, taken, each)
        except BaseException:  # a tensor that cannot be copied, say: no rank gets a part of the round
            for queue, before in zip(self._queues, filled, strict=True):
                queue.take_back(before)
            raise

    def flush(self) -> None:
        """Send what was appended, without waiting for anyone.

        Raises:
            LostRank: A destination cannot be reached.
        """
        with self._lock:
            for queue in self._queues:
                if queue.buffer.filled > HEADER_BYTES:
                    self._post(queue, queue.buffer)
                    queue.next_buffer()

    def send_end(self, generation: int, after: Snapshot) -> None:
        """Tell everyone that the pass is over, waiting for who has not taken the end of the one before.

        Raises:
            LostRank: A destination cannot be reached.
        """
        # What was sent has to stay until it is answered: a send that nobody holds does not go out.
        held, answers = self._finals, self._acknowledgements
        self._finals, self._acknowledgements = [], []
        self._wait(answers)
        held.clear()
        self._send_last(Record(Kind.END, generation, epoch=after.epoch, progress=after.progress), b"")

    def send_failure(self, generation: int, failure: bytes, lost: int | None = None) -> None:
        """Tell everyone but a lost rank about a failure, without waiting for anyone.

        Raises:
            LostRank: A destination cannot be reached.
        """
        if lost is not None:
            self._lost.add(lost)
        self._send_last(Record(Kind.FAILURE, generation, payload=len(failure)), failure)

    def unreachable(self) -> LostRank | None:
        """A destination whose connection is broken, if there is one."""
        for index in self._destinations():
            error = self._connection.fault(index)
            if error is not None:
                return LostRank(index, error)
        return None

    def drain(self, seconds: float) -> None:
        """Wait until everyone has taken the last record of every pass, or is gone, or time is up."""
        deadline = time.monotonic() + seconds
        for index, work, _ in self._acknowledgements:
            if index not in self._lost:
                try:
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError:
                    self._lost.add(index)

    def cut(self) -> None:
        """Close every connection of this rank, so that a thread that waits for one continues."""
        self._connection.cut(self._destinations())

    def _packed(self, batch: object) -> Packed:
        tensors: list[torch.Tensor] = []
        structure = self._codec.encode(batch, tensors)
        specs, layout = described(spec_of(tensors))
        return Packed(specs + structure, layout, tensors)

    def _destinations(self) -> list[int]:
        return [i for queue in self._queues for i in queue.destinations if i not in self._lost]

    def _send_last(self, record: Record, payload: bytes) -> None:
        unreached: LostRank | None = None
        header = bytearray(HEADER_BYTES)
        record.write(memoryview(header), 0)
        with self._lock:
            for queue in self._queues:
                buffer = SendBuffer()
                buffer.append_bytes(bytes(header) + payload)
                self._finals.append(buffer)
                try:
                    self._post(queue, buffer)
                except LostRank as lost:
                    unreached = lost
            for index in self._destinations():
                byte = torch.zeros(1, dtype=torch.uint8)
                try:
                    work = self._connection.receive(byte, index, ACKNOWLEDGE_TAG)
                except RuntimeError as error:
                    unreached = LostRank(index, error)
                else:
                    self._acknowledgements.append((index, work, byte))
        if unreached is not None:
            raise unreached

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        for index, work, _ in transfers:
            if index in self._lost:
                continue
            self.waiting_for = index
            try:
                work.wait(_UNLIMITED)
            except RuntimeError as error:
                raise LostRank(index, error) from error
            finally:
                self.waiting_for = None

    def _post(self, queue: SendQueue, buffer: SendBuffer) -> None:
        unreached: LostRank | None = None
        for message in queue.messages(buffer):
            for index in queue.destinations:
                if index in self._lost:
                    continue
                try:
                    work = self._connection.send(message, index, DATA_TAG)
                except RuntimeError as error:
                    unreached = LostRank(index, error)
                else:
                    buffer.sends.append((index, work, message))
        if unreached is not None:
            raise unreached
