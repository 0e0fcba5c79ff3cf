"""A loader that is read one batch ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dataloader_dispatch.synchronized.move import to_device

Batch = TypeVar("Batch")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Where a loader stands; None for what it does not tell.

    Attributes:
        state: A copy of its ``state_dict``.
        epoch: Its ``epoch``.
        progress: Its ``epoch_progress``.
    """

    state: object = None
    epoch: int | None = None
    progress: float | None = None


def place_of(loader: object) -> Place:
    """Where a loader stands now."""
    state = getattr(loader, "state_dict", None)
    # A copy, because the loader may go on to change what it returned.
    copied = copy.deepcopy(state()) if callable(state) else None
    progress = getattr(loader, "epoch_progress", None)
    return Place(copied, epoch_of(loader), None if progress is None else float(progress))


def epoch_of(loader: object) -> int | None:
    """The epoch that a loader says it stands in."""
    epoch = getattr(loader, "epoch", None)
    return int(epoch) if isinstance(epoch, int) else None


class LookAhead(Generic[Batch]):
    """The batches of one pass over a loader, one of which is fetched before it is asked for.

    What a loader raises is kept in ``error``, so that the other ranks can be told first.

    Args:
        loader: The loader.
        device: Where the batches go when they are fetched.
        take_interruption: What the loader raised while it was not asked for anything, if so.

    Attributes:
        has: Whether a batch is held.
        error: What the loader raised.
        taken: Number of batches taken.
        place: Where the loader stood behind the last batch taken; None before the pass began.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device,
        take_interruption: Callable[[], Exception | None],
    ) -> None:
        self._take_interruption = take_interruption
        self.loader = loader
        self.device = device
        self.has = False
        self.error: Exception | None = None
        self.taken = 0
        self.place: Place | None = None
        self._batch: Batch | None = None
        self._iterator: Iterator[Batch] = iter(())

    def start(self, enter: Callable[[], None], before: LookAhead[Batch] | None) -> None:
        """Begin the pass and fetch its first batch.

        Args:
            enter: Puts the loader into the right epoch.
            before: The pass before, if it was broken off. A loader that is its own iterator goes on with the
                batch that was fetched for it.
        """
        self.attempt(enter)
        if self.error is not None or (iterator := self.attempt(lambda: iter(self.loader))) is None:
            return
        self._iterator = iterator
        if before is not None and before.has and before._iterator is iterator:
            self._batch, self.has, self.place = before._batch, True, before.place
        else:
            self.fetch()

    def stand_still(self) -> None:
        """Have no batch in this pass, and leave the loader where it is."""
        self.place = place_of(self.loader)

    def fetch(self) -> None:
        """Fetch the next batch, if there is one."""
        self.has = False
        self.error = self._take_interruption()
        if self.error is not None:
            return
        try:
            self.place = place_of(self.loader)
            self._batch = to_device(next(self._iterator), self.device)
            self.has = True
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
            self.error = error

    def take(self) -> Batch:
        """The batch held. The caller fetches the next one."""
        batch, self._batch = self._batch, None
        self.taken += 1
        return batch  # type: ignore[return-value]  # there is one

    @property
    def first(self) -> Batch:
        """The batch held, which stays."""
        return self._batch  # type: ignore[return-value]  # there is one

    def attempt(self, action: Callable[[], Result]) -> Result | None:
        """What an action returns; None, and its error in ``error``, if it fails."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  # raised as soon as the other ranks know of it
            self.error = error
            return None
