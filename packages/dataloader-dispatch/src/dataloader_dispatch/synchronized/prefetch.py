"""A loader that is read one batch ahead, and what one rank delivers of it in a pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import torch

from dataloader_dispatch.batches import Uneven, copy_of, to_device
from dataloader_dispatch.synchronized.exchange import Exchange, WarnOnce
from dist_env import RankFailedError

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


class Prefetch(Generic[Batch]):
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

    def start(self, enter: Callable[[], None], before: Prefetch[Batch] | None) -> None:
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


@dataclass(frozen=True)
class Settings(Generic[Batch]):
    """What stays the same in every pass.

    Attributes:
        loader: This rank's loader.
        device: Where batches go.
        group: The ranks, at least two.
        uneven: What to do when ranks run out.
        make_dummy: Makes a batch that stands in for a missing one, under ``uneven="pad"``.
        warn_once: What the user was told.
    """

    loader: Iterable[Batch]
    device: torch.device
    group: Exchange
    uneven: Uneven
    make_dummy: Callable[[Batch], Batch]
    warn_once: WarnOnce


class Delivery(Generic[Batch]):
    """The batches of this rank in one pass.

    Args:
        settings: What stays the same in every pass.

    Attributes:
        prefetch: The loader.
        is_dummy: Whether the last batch delivered stands in for a missing one.
    """

    def __init__(self, settings: Settings[Batch]) -> None:
        self.settings = settings
        self.prefetch = Prefetch(settings.loader, settings.device, settings.group.take_interruption)
        self.is_dummy = False
        self._dummy: Batch | None = None

    def prepare_dummy(self, batch: Batch) -> None:
        """Make the stand-in of this batch from now on; a copy, as users may change what they receive."""
        self._dummy = copy_of(self.settings.make_dummy(batch))

    def next(self, *, fetch: bool) -> Batch:
        """The next batch, or one that stands in for it.

        Args:
            fetch: Whether to fetch the one after it.
        """
        prefetch = self.prefetch
        self.is_dummy = not prefetch.has
        if self.is_dummy:
            return copy_of(self._dummy)  # type: ignore[return-value]  # one was prepared
        batch = prefetch.take()
        if fetch:
            prefetch.fetch()
            if self.settings.uneven == "pad" and not prefetch.has and prefetch.error is None:
                prefetch.attempt(lambda: self.prepare_dummy(batch))
        return batch

    def raise_failure(self, errors: dict[int, str]) -> NoReturn:
        """Raise what this rank's loader raised, or else that others failed.

        Args:
            errors: What the loaders raised, by position of the rank.
        """
        if self.prefetch.error is not None:
            raise self.prefetch.error
        group = self.settings.group
        told = "; ".join(f"{group.name(index)} failed: {text}" for index, text in errors.items())
        raise RankFailedError(f"loading data: {told}. Look at the log of that rank", group.ranks[min(errors)])
