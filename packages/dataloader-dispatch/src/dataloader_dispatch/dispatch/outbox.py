"""The sending side: packs batches and sends them to every rank that shares one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from dataloader_dispatch.batch_codec import BatchCodec
from dataloader_dispatch.dispatch.connection import Connection
from dataloader_dispatch.dispatch.lane import UNDER_WAY, Lane, Parcel, Stamp, Transfer, packed_alike
from dataloader_dispatch.dispatch.message import ACKNOWLEDGE_TAG, DATA_TAG, Kind
from dataloader_dispatch.dispatch.placement import Placement
from dataloader_dispatch.rank_group import RankGroup

_UNLIMITED = timedelta(days=365)
"""Whoever waits for this rank counts the time; the others may rightly pause for an evaluation."""


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

    def __init__(self, group: RankGroup, placement: Placement, prefetch: int, codec: BatchCodec) -> None:
        self._codec = codec
        self._connection = Connection(group)
        self._lanes = [
            Lane([i for i, share in enumerate(placement.shares) if share == lane and i], prefetch)
            for lane in range(placement.width)
        ]
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._finals: deque[_Final] = deque()
        self.round_bytes = 0
        """What a round takes in a message, as far as is known."""
        self.waiting_for: int | None = None
        """Position of the rank whose receives the sending thread waits for."""

    def send_rounds(
        self, stamps: Sequence[Stamp], rounds: Sequence[Sequence[object]]
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
        lanes = [(share, lane) for share, lane in enumerate(self._lanes) if lane.destinations]
        messages = [
            list(packed_alike([each[share] for each in rounds], stamps, self._codec)) for share, _ in lanes
        ]
        if any(len(packed) > 1 for packed in messages):
            for stamp, each in zip(stamps, rounds, strict=True):
                yield from self.send_rounds([stamp], [each])
            return
        for (share, lane), (packed,) in zip(lanes, messages, strict=True):
            parcel = lane.next_parcel()
            self._wait(parcel.sends)
            parcel.sends.clear()
            parcel.pack(packed, share, lane.is_news(packed))
            with self._lock:
                self._post(lane, parcel, Kind.BATCH, packed.stamps[-1])
            self.round_bytes = parcel.payload // parcel.rounds
        yield rounds

    def send_end(self, stamp: Stamp) -> None:
        """Tell everyone that the pass is over, waiting for who has not taken the end of earlier ones.

        Raises:
            LostRank: A destination cannot be reached.
        """
        while len(self._finals) >= UNDER_WAY:
            self._wait(self._finals[0].acknowledgements)
            self._finals.popleft()
        self._send_last(Kind.END, stamp, b"")

    def send_failure(self, stamp: Stamp, payload: bytes, lost: int | None = None) -> None:
        """Tell everyone but a lost rank about a failure, without waiting for anyone.

        Raises:
            LostRank: A destination cannot be reached.
        """
        if lost is not None:
            self._lost.add(lost)
        self._send_last(Kind.FAILURE, stamp, payload)

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
        return [i for lane in self._lanes for i in lane.destinations if i not in self._lost]

    def _send_last(self, kind: Kind, stamp: Stamp, payload: bytes) -> None:
        unreached: LostRank | None = None
        final = _Final([], [])
        with self._lock:
            self._finals.append(final)
            for lane in self._lanes:
                parcel = Parcel()
                parcel.fill(payload)
                final.parcels.append(parcel)
                try:
                    self._post(lane, parcel, kind, stamp)
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

    def _post(self, lane: Lane, parcel: Parcel, kind: Kind, stamp: Stamp) -> None:
        unreached: LostRank | None = None
        for piece in lane.pieces(parcel, kind, stamp):
            for index in lane.destinations:
                if index in self._lost:
                    continue
                try:
                    work = self._connection.send(piece, index, DATA_TAG)
                except RuntimeError as error:
                    unreached = LostRank(index, error)
                else:
                    parcel.sends.append((index, work, piece))
        if unreached is not None:
            raise unreached


class _Final(NamedTuple):
    """The last message of a pass to everyone, and the receives for their answers."""

    parcels: list[Parcel]
    acknowledgements: list[Transfer]
