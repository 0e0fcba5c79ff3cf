"""The first rank's loader: rounds of batches, and where it stood when the caller had received each."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from dataloader_dispatch.batches import Uneven, dense_to_device, masked_dummy
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import PassGenerator, end_workers, length_of, set_loader_epoch
from dataloader_dispatch.torchdata_loaders import begin_pass, load_loader_state, loader_state

logger = logging.getLogger("dataloader_dispatch")

MakeDummy = Callable[[Any], Any]

_END_OF_READ_SECONDS = 5.0


class Snapshot(NamedTuple):
    """Where a loader stands.

    Attributes:
        state: Its state; None if it has none.
        epoch: Epoch of the next batch.
        progress: Share of the epoch that is over.
    """

    state: dict[str, object] | None
    epoch: int
    progress: float


class Round(NamedTuple):
    """One batch for every data-parallel position; none at the end of a pass.

    Attributes:
        batches: The batches.
        after: Where the loader stands behind them.
        real: How many of them are the loader's; the rest fills up the round and counts for nothing.
    """

    batches: list[Any]
    after: Snapshot
    real: int


class Position:
    """Epoch and state of a loader, through whatever it has for them.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = 0
        self.has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.has_resharding = self.has_state and hasattr(loader, "load_resharded")
        self.counts_epochs = isinstance(getattr(loader, "epoch", None), int)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch: the loader's, or the number of passes that reached the end."""
        return int(self._loader.epoch) if self.counts_epochs else self._epoch

    @property
    def progress(self) -> float | None:
        """The loader's ``epoch_progress``, if it has one."""
        value = getattr(self._loader, "epoch_progress", None)
        return None if value is None else float(value)

    def end_epoch(self) -> None:
        """Count a pass that reached the end."""
        self._epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its samplers and its dataset, the epoch."""
        self._epoch = epoch
        set_loader_epoch(self._loader, epoch)

    def go_back(self, epoch: int) -> None:
        """Return to an epoch that reading ahead has left. Other parts than the loader are not told."""
        self._epoch = epoch
        if self.counts_epochs and self._loader.epoch != epoch:
            self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, object] | None:
        """A copy of the loader's state; None if it has none."""
        return copy.deepcopy(loader_state(self._loader)) if self.has_state else None

    def load_state_dict(self, state: object) -> None:
        """Go to a saved position."""
        load_loader_state(self._loader, state)

    def load_resharded(self, states: Sequence[object]) -> None:
        """Go to the position that several ranks saved; empty states of a dispatcher do not count."""
        self._loader.load_resharded([state for state in states if state], rank=0, world_size=1)


class Reader:
    """Reads rounds ahead of the caller, and goes back to the caller's position where that is asked for.

    The lock is held while the loader works. `snapshot` is what the caller has received.

    Args:
        loader: What to read.
        width: Batches in a round.
        uneven: What becomes of a last round that is not complete.
        make_dummy: Makes the batches that ``uneven="pad"`` fills a round with, from the last real one.
    """

    def __init__(
        self, loader: Iterable[Any], width: int, uneven: Uneven, make_dummy: MakeDummy | None
    ) -> None:
        self.loader = loader
        self.position = Position(loader)
        self.generator = PassGenerator(loader)
        self._width = width
        self._uneven = uneven
        self._make_dummy = make_dummy or masked_dummy
        # Whoever has paused it may ask for the position meanwhile.
        self._lock = threading.RLock()
        self._iterator: Iterator[Any] | None = None
        self._begun = 0
        self._rounds = 0
        self._exhausted = False
        self._reported = False
        self._is_ahead = False
        self._consumed = Snapshot(None, 0, 0.0)

    def read(self, generation: int, is_current: Callable[[], bool]) -> Round | None:
        """The next round of a pass; None as soon as the pass is no longer the current one.

        Raises:
            DataError: The last round is not complete and ``uneven`` is "error", or no dummy can be made.
            Exception: Whatever the loader raises.
        """
        with self._lock:
            batches: list[Any] = []
            while len(batches) < self._width:
                if not is_current():
                    return None
                self._begin(generation)
                batch = self._next()
                if batch is _END:
                    return self._last_round(batches)
                batches.append(batch)
            self._rounds += 1
            return Round(batches, self._look(), self._width)

    def consumed(self, taken: Round) -> None:
        """The caller has received a round, or the end of the pass."""
        self._consumed = taken.after
        self._is_ahead = bool(taken.batches)

    def snapshot(self, generation: int | None) -> Snapshot:
        """Where the caller stands. Its state is not a copy: many ask only for the epoch, in every step.

        Args:
            generation: The pass that was asked for last, if it is still going on.
        """
        if generation is not None and self._begun != generation:
            with self._lock:
                self._begin(generation)
        if self._is_ahead:
            return self._consumed
        with self._lock:
            return self._look()

    def paused(self) -> AbstractContextManager[object]:
        """A context in which no other thread has the loader work."""
        return self._lock

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or leave the position alone if the loader does so."""
        with self._lock:
            self._rewind(epoch)
            self.position.set_epoch(epoch)
            self._is_ahead = self._is_ahead and self.position.epoch == self._consumed.epoch
            self._rounds = 0

    def move(self, go: Callable[[Position], None]) -> None:
        """Let a function change the position."""
        with self._lock:
            self._iterator, self._is_ahead, self._rounds = None, False, 0
            go(self.position)

    def drop(self) -> None:
        """Let go of the loader's iterator, which ends its worker processes."""
        with self._lock:
            self._iterator = None

    def end_workers(self) -> None:
        """End the worker processes of the loader, unless a read takes too long; the position stays."""
        # A loader that has hung, of which the caller is about to tell, would be waited for for ever.
        if self._lock.acquire(timeout=_END_OF_READ_SECONDS):
            try:
                end_workers(self.loader, self._iterator)
                self._iterator = None
                # torchdata's loader (0.11) keeps what was read ahead for its next iterator.
                if self._is_ahead and getattr(self.loader, "next_iter_state", None) is not None:
                    self.position.load_state_dict(copy.deepcopy(self._consumed.state))
            finally:
                self._lock.release()

    def _begin(self, generation: int) -> None:
        if self._begun == generation:
            return
        self._rewind()
        self.generator.renew()
        self._iterator = begin_pass(self.loader)
        self._rounds, self._exhausted = 0, False
        self._consumed, self._is_ahead = self._look(), True
        self._begun = generation

    def _rewind(self, epoch: int | None = None) -> None:
        """Undo what was read and not received, as far as the next pass would not begin anew by itself.

        Args:
            epoch: The epoch that comes next. Where the loader counts epochs and this is another one than the
                caller's, there is nothing to go back for.
        """
        self._iterator = None
        if not self._is_ahead or (self.position.counts_epochs and epoch not in (None, self._consumed.epoch)):
            return
        # A DataLoader begins each pass anew, but reading to the end may have begun the next epoch.
        if self._consumed.state is not None and not isinstance(self.loader, DataLoader):
            self.position.load_state_dict(copy.deepcopy(self._consumed.state))
            self._is_ahead = False
        self.position.go_back(self._consumed.epoch)

    def _next(self) -> Any:
        if self._exhausted or self._iterator is None:
            return _END
        try:
            return next(self._iterator, _END)
        except (OSError, EOFError, RuntimeError) as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """A worker process that dies shows as whatever its pipe did last."""
        workers = getattr(self.loader, "num_workers", 0)
        if workers and (isinstance(error, OSError | EOFError) or "worker" in str(error)):
            error.add_note(
                f"One of the loader's worker processes (num_workers={workers}) may have died; the system may "
                "have killed it for its memory"
            )

    def _last_round(self, batches: list[Any]) -> Round:
        first = not self._exhausted
        self._exhausted = True
        if first:
            self.position.end_epoch()
        after = self._look()
        if batches and self._uneven == "pad":
            dummies = [self._make_dummy(batches[-1]) for _ in range(self._width - len(batches))]
            return Round(batches + dummies, after, len(batches))
        if batches and self._uneven == "error":
            raise DataError(
                f"the loader ended after {self._rounds * self._width + len(batches)} batches, which is no "
                f"multiple of the {self._width} that a round needs: {len(batches)} are left over. Let the "
                "number of batches be a multiple, or choose uneven='stop' or 'pad'."
            )
        if batches and not self._reported:
            self._reported = True
            logger.warning(
                "the last round of an epoch has %d of the %d batches it needs; nobody gets them "
                "(uneven='stop'). Choose uneven='pad' to use them",
                len(batches),
                self._width,
            )
        return Round([], after, 0)

    def _look(self) -> Snapshot:
        progress = self.position.progress
        if progress is None:
            progress = self._share()
        return Snapshot(self.position.state_dict(), self.position.epoch, progress)

    def _share(self) -> float:
        length = length_of(self.loader)
        if self._exhausted or not length:
            return 0.0
        return min(1.0, self._rounds * self._width / length)


class _End:
    """The end of the data; a type of its own, since a batch can be anything."""


_END = _End()


def outdated() -> RuntimeError:
    """The error for an iterator whose time is over."""
    return RuntimeError(
        "this iterator is no longer valid: a newer one was made, or set_epoch or load_state_dict was "
        "called. Use the newer one, or call iter() again."
    )


class Single:
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
        self._iterator = begin_pass(self._loader)
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
        return dense_to_device(batch, self._device)

    def epoch(self) -> int:
        return self._position.epoch

    def progress(self) -> float:
        progress, length = self._position.progress, length_of(self._loader)
        if progress is not None:
            return progress
        return min(1.0, max(0, self._received) / length) if length else 0.0

    def set_epoch(self, epoch: int) -> None:
        self.move(lambda position: position.set_epoch(epoch))

    def state_dict(self) -> dict[str, object]:
        return self._position.state_dict() or {}

    def move(self, go: Callable[[Position], None]) -> None:
        self._iterator, self._received = None, 0
        go(self._position)

    def end_workers(self) -> None:
        end_workers(self._loader, self._iterator)
        self._iterator = None

    def close(self) -> None:
        self._iterator = None
