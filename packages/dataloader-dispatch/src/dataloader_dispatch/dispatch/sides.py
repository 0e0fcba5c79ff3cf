"""What a rank does in a dispatch: load and send, receive, or, where there is one rank only, just load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dataloader_dispatch.batch_codec import BatchCodec
from dataloader_dispatch.dispatch.aside import run_aside
from dataloader_dispatch.dispatch.failure import decode
from dataloader_dispatch.dispatch.inbox import Inbox
from dataloader_dispatch.dispatch.message import HEADER_BYTES, Kind, memory_of
from dataloader_dispatch.dispatch.producer import Producer, outdated
from dataloader_dispatch.dispatch.reader import Position, Reader, length_of
from dataloader_dispatch.dispatch.unpack import Arrived, Unpacker, moved
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.worker_state import end_workers
from dist_env import RankFailedError, RankTimeoutError


class Side(Protocol):
    """One rank's part. Passes are numbered from 1; only the last one gives batches.

    Attributes:
        is_dummy: Whether the last batch of the pass was one that fills up a round.
    """

    is_dummy: bool

    def start_pass(self) -> int:
        """Begin a pass and return its number."""

    def take(self, number: int) -> Any:
        """The next batch of a pass; `StopIteration` at its end."""

    def epoch(self) -> int:
        """Epoch of the next batch."""

    def progress(self) -> float:
        """Share of the epoch that was received."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""

    def state_dict(self) -> dict[str, object]:
        """The position behind the last batch received."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position."""

    def load_resharded(self, states: Sequence[Mapping[str, object]]) -> None:
        """Go to the position that several ranks saved together."""

    def end_workers(self) -> None:
        """Leave the pass, and end the loader's worker processes, also where the dispatch is over."""

    def close(self) -> None:
        """End threads and connections."""


class Root:
    """The rank that loads, where there are several.

    Args:
        reader: The rounds.
        producer: Reads and sends them in the background.
        share: Position of this rank's own batch in a round.
        device: Where its tensors are to be.
    """

    def __init__(self, reader: Reader, producer: Producer, share: int, device: torch.device) -> None:
        self._reader = reader
        self._producer = producer
        self._share = share
        self._device = device
        self.is_dummy = False

    def start_pass(self) -> int:
        self._reader.generator.draw()
        number = self._producer.start_pass()
        self.is_dummy = False
        return number

    def take(self, number: int) -> Any:
        taken = self._producer.take(number)
        self._reader.consumed(taken)
        if not taken.batches:
            raise StopIteration
        self.is_dummy = self._share >= taken.real
        return moved(taken.batches[self._share], self._device)

    def epoch(self) -> int:
        return self._reader.snapshot(self._producer.current).epoch

    def progress(self) -> float:
        return self._reader.snapshot(self._producer.current).progress

    def set_epoch(self, epoch: int) -> None:
        self._producer.retire()
        self._reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        return self._reader.snapshot(self._producer.current).state or {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._producer.retire()
        self._reader.load_state_dict(state)

    def load_resharded(self, states: Sequence[Mapping[str, object]]) -> None:
        self._producer.retire()
        self._reader.load_resharded(states)

    def end_workers(self) -> None:
        self._producer.leave_pass()
        self._reader.end_workers()

    def close(self) -> None:
        self._producer.close()


class Follower:
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
                self._outcome = decode(payload)
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
            run_aside(self._inbox.close)
        self._inbox = None

    def _opened(self) -> Inbox:
        if self._inbox is None:
            raise RuntimeError("the data loader was closed; make a new one")
        if self._failed is not None:
            raise self._failed
        return self._inbox


class Alone:
    """The only rank: batches go from the loader to the device, without thread or process group.

    Args:
        loader: The loader.
        device: Where tensors are to be.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._position = Position(loader)
        self._iterator: Iterator[Any] | None = None
        self._number = 0
        self._received = 0
        self.is_dummy = False

    def start_pass(self) -> int:
        self._number += 1
        self._iterator = iter(self._loader)
        self._received = 0
        return self._number

    def take(self, number: int) -> Any:
        if self._iterator is None or number != self._number:
            raise outdated()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._received >= 0:
                self._position.end_epoch()
            self._received = -1
            raise
        self._received += 1
        return moved(batch, self._device)

    def epoch(self) -> int:
        return self._position.epoch

    def progress(self) -> float:
        progress, length = self._position.progress, length_of(self._loader)
        if progress is not None:
            return progress
        return min(1.0, max(0, self._received) / length) if length else 0.0

    def set_epoch(self, epoch: int) -> None:
        self._iterator, self._received = None, 0
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        return self._position.state_dict() or {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._iterator, self._received = None, 0
        self._position.load_state_dict(state)

    def load_resharded(self, states: Sequence[Mapping[str, object]]) -> None:
        self._iterator, self._received = None, 0
        self._position.load_resharded(states)

    def end_workers(self) -> None:
        end_workers(self._loader, self._iterator)
        self._iterator = None

    def close(self) -> None:
        self._iterator = None
