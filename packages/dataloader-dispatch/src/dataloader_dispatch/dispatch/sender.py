"""The sending side: who gets which batch, how batches are packed, and how they reach every rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch.connection import BatchCodec, Connection
from dataloader_dispatch.dispatch.message import (
    ACKNOWLEDGE_TAG,
    DATA_TAG,
    FIRST_CAPACITY,
    HEADER_BYTES,
    U32,
    Header,
    Kind,
    Layout,
    aligned,
    encode_specs,
    memory_of,
    spec_of,
    write_standing,
)
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup

DataDimension = int | str | tuple[int | str, ...] | None
"""Index or name of the data-parallel dimension of a mesh; several of them, outermost first; or None."""

Transfer = tuple[int, dist.Work, torch.Tensor]
"""A rank of the group, a send to it or a receive from it, and the memory that it uses."""

UNDER_WAY = 2
"""Messages whose sends need not have ended: one travels while the next is packed."""
_GROWTH = 1.25
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
            f"dp_mesh_dim={dp_mesh_dim!r} must name each dimension once, in the order that the mesh has them"
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
        f"dp_mesh_dim={dp_mesh_dim!r} is no dimension of the mesh; it has the dimensions 0 to {mesh.ndim - 1}"
        f"{known}. Give one of these, or None to send every rank the same batches"
    )


class PassInfo(NamedTuple):
    """What a message tells of the pass: its number, where the loader stands behind a round, and how many
    batches of the round are real; the others fill it up."""

    generation: int
    epoch: int
    progress: float
    real: int = 0


class Packed(NamedTuple):
    """Batches of one description, without their containers."""

    described: bytes
    infos: list[PassInfo]
    tensors: list[list[torch.Tensor]]


class SendQueue:
    """What goes to all ranks with the same share: the same messages in the same order.

    Args:
        destinations: Positions of these ranks in the group.
        prefetch: Receives that each has posted.
    """

    def __init__(self, destinations: list[int], prefetch: int) -> None:
        self.destinations = destinations
        self._buffers = deque(SendBuffer() for _ in range(UNDER_WAY))
        self._sequence = 0
        self._capacity = FIRST_CAPACITY
        self._capacities = deque([FIRST_CAPACITY] * prefetch)
        self._known = (0, b"")

    def next_buffer(self) -> SendBuffer:
        """The buffer that was used longest ago; its sends may not have ended."""
        self._buffers.rotate(-1)
        return self._buffers[-1]

    def is_news(self, packed: Packed) -> bool:
        """Whether the description is another than that of the batch before. It is known afterwards."""
        before, self._known = self._known, (packed.infos[0].generation, packed.described)
        return before != self._known

    def pieces(self, buffer: SendBuffer, kind: Kind, info: PassInfo) -> list[torch.Tensor]:
        """The buffers to send: one, or more where the receives that are posted are too small for it."""
        total = HEADER_BYTES + aligned(buffer.description) + buffer.payload
        if total > self._capacity:
            first = self._capacity == FIRST_CAPACITY
            self._capacity = aligned(total if first else int(total * _GROWTH))
        sent = min(total, self._head(buffer, kind, info))
        pieces = [buffer.message(sent)]
        while sent < total:
            rest = buffer.data[sent : min(sent + self._capacities[0] - HEADER_BYTES, total)]
            piece = SendBuffer()
            piece.fill(memory_of(rest))
            self._head(piece, Kind.MORE, info)
            pieces.append(piece.message(HEADER_BYTES + rest.numel()))
            sent += rest.numel()
        return pieces

    def _head(self, buffer: SendBuffer, kind: Kind, info: PassInfo) -> int:
        """Write the header, and return how much the receive takes that the buffer goes to."""
        self._sequence += 1
        self._capacities.append(self._capacity)
        Header(
            self._sequence,
            kind,
            info.generation,
            buffer.description,
            buffer.payload,
            self._capacity,
            info.epoch,
            info.progress,
            buffer.rounds,
        ).write(buffer.memory)
        return self._capacities.popleft()


class SendBuffer:
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
            self._whole = self.data[:num_bytes]
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
        if self.data.numel() < start + self.payload:
            self._grow(start + self.payload)
        if news:
            self.memory[HEADER_BYTES : HEADER_BYTES + len(described)] = described
        if start != self._start:
            self._views, self._start = [], start
        with torch.no_grad():
            for number, (info, tensors) in enumerate(zip(packed.infos, packed.tensors, strict=True)):
                place = start + number * stride
                write_standing(self.memory, place, info.epoch, info.progress, share >= info.real)
                if number == len(self._views):
                    self._views.append(self._layout.tensors_in(self.data, place + HEADER_BYTES))
                for view, tensor in zip(self._views[number], tensors, strict=True):
                    view.copy_(tensor)

    def _grow(self, num_bytes: int) -> None:
        self.data = torch.empty(aligned(num_bytes), dtype=torch.uint8)
        self.memory = memory_of(self.data)
        self._views = []
        self._whole = self.data


def packed_alike(batches: Sequence[object], infos: Sequence[PassInfo], codec: BatchCodec) -> Iterator[Packed]:
    """Batches in their order, those together that follow one another and have one description.

    Raises:
        DataError: A value in a batch cannot be sent.
    """
    group: Packed | None = None
    for batch, info in zip(batches, infos, strict=True):
        tensors: list[torch.Tensor] = []
        structure = codec.encode(batch, tensors)
        specs = encode_specs(spec_of(tensors))
        described = b"".join((U32.pack(len(specs)), specs, structure))
        if group is not None and group.described == described:
            group.infos.append(info)
            group.tensors.append(tensors)
            continue
        if group is not None:
            yield group
        group = Packed(described, [info], [tensors])
    if group is not None:
        yield group


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
    """Sends rounds of batches. One thread packs; `send_failure` and `unreachable` may come from another.

    Args:
        group: The ranks; this one is the root.
        placement: Who gets which batch.
        prefetch: Receives that every destination has posted.
        codec: Writes the batches.
    """

    def __init__(self, group: ControlGroup, placement: Placement, prefetch: int, codec: BatchCodec) -> None:
        self._codec = codec
        self._connection = Connection(group)
        self._queues = [
            SendQueue([i for i, share in enumerate(placement.shares) if share == queue and i], prefetch)
            for queue in range(placement.width)
        ]
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._finals: deque[_Final] = deque()
        self.round_bytes = 0
        """What a round takes in a message, as far as is known."""
        self.waiting_for: int | None = None
        """Position of the rank whose receives the sending thread waits for."""

    def send_rounds(
        self, infos: Sequence[PassInfo], rounds: Sequence[Sequence[object]]
    ) -> Iterator[Sequence[Sequence[object]]]:
        """Send batch i of each round to everyone with share i, waiting for who is too far behind.

        Rounds of one call travel together if they are alike. If not, whoever waits for the first of them must
        not have to wait until there is room for the last.

        Yields:
            Rounds that are on their way to all, as soon as they are.

        Raises:
            LostRank: A destination cannot be reached.
            DataError: A batch cannot be sent.
        """
        queues = [(share, queue) for share, queue in enumerate(self._queues) if queue.destinations]
        messages = [
            list(packed_alike([each[share] for each in rounds], infos, self._codec)) for share, _ in queues
        ]
        if any(len(packed) > 1 for packed in messages):
            for info, each in zip(infos, rounds, strict=True):
                yield from self.send_rounds([info], [each])
            return
        for (share, queue), (packed,) in zip(queues, messages, strict=True):
            buffer = queue.next_buffer()
            self._wait(buffer.sends)
            buffer.sends.clear()
            buffer.pack(packed, share, queue.is_news(packed))
            with self._lock:
                self._post(queue, buffer, Kind.BATCH, packed.infos[-1])
            self.round_bytes = buffer.payload // buffer.rounds
        yield rounds

    def send_end(self, info: PassInfo) -> None:
        """Tell everyone that the pass is over, waiting for who has not taken the end of earlier ones.

        Raises:
            LostRank: A destination cannot be reached.
        """
        while len(self._finals) >= UNDER_WAY:
            self._wait(self._finals[0].acknowledgements)
            self._finals.popleft()
        self._send_last(Kind.END, info, b"")

    def send_failure(self, info: PassInfo, payload: bytes, lost: int | None = None) -> None:
        """Tell everyone but a lost rank about a failure, without waiting for anyone.

        Raises:
            LostRank: A destination cannot be reached.
        """
        if lost is not None:
            self._lost.add(lost)
        self._send_last(Kind.FAILURE, info, payload)

    def unreachable(self) -> LostRank | None:
        """A destination whose connection is broken, if there is one."""
        for index in self._destinations():
            error = self._connection.fault(index)
            if error is not None:
                return LostRank(index, error)
        return None

    def drain(self, seconds: float) -> None:
        """Wait until everyone has taken the last message of every pass, or is gone, or time is up."""
        deadline = time.monotonic() + seconds
        for index, work, _ in [entry for final in self._finals for entry in final.acknowledgements]:
            if index not in self._lost:
                try:
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
                except RuntimeError:
                    self._lost.add(index)

    def cut(self) -> None:
        """Close every connection of this rank, so that a thread that waits for one goes on."""
        self._connection.cut(self._destinations())

    def _destinations(self) -> list[int]:
        return [i for queue in self._queues for i in queue.destinations if i not in self._lost]

    def _send_last(self, kind: Kind, info: PassInfo, payload: bytes) -> None:
        unreached: LostRank | None = None
        final = _Final([], [])
        with self._lock:
            self._finals.append(final)
            for queue in self._queues:
                buffer = SendBuffer()
                buffer.fill(payload)
                final.buffers.append(buffer)
                try:
                    self._post(queue, buffer, kind, info)
                except LostRank as lost:
                    unreached = lost
            for index in self._destinations():
                byte = torch.zeros(1, dtype=torch.uint8)
                try:
                    work = self._connection.receive(byte, index, ACKNOWLEDGE_TAG)
                except RuntimeError as error:
                    unreached = LostRank(index, error)
                else:
                    final.acknowledgements.append((index, work, byte))
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

    def _post(self, queue: SendQueue, buffer: SendBuffer, kind: Kind, info: PassInfo) -> None:
        unreached: LostRank | None = None
        for piece in queue.pieces(buffer, kind, info):
            for index in queue.destinations:
                if index in self._lost:
                    continue
                try:
                    work = self._connection.send(piece, index, DATA_TAG)
                except RuntimeError as error:
                    unreached = LostRank(index, error)
                else:
                    buffer.sends.append((index, work, piece))
        if unreached is not None:
            raise unreached


class _Final(NamedTuple):
    """The last message of a pass to everyone, and the receives for their answers."""

    buffers: list[SendBuffer]
    acknowledgements: list[Transfer]
