"""One pass of several ranks over their loaders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from dataloader_dispatch.synchronized.ahead import LookAhead, Place, epoch_of
from dataloader_dispatch.synchronized.counted import counted, is_surplus
from dataloader_dispatch.synchronized.delivery import Delivery, Settings
from dataloader_dispatch.synchronized.meeting import Opened, open_epoch
from dataloader_dispatch.synchronized.stepwise import stepwise

Batch = TypeVar("Batch")


class Epoch(Generic[Batch]):
    """One pass of this rank over its loader, to an end that all ranks agree on.

    Args:
        settings: What stays the same in every pass.
        number: Number of the pass, the same on all ranks.

    Attributes:
        delivery: This rank's batches.
        lengths: Lengths of the loaders, None for those without; empty until the ranks have met.
        is_over: Whether the pass came to its end.
        has_failed: Whether an error ended it.
    """

    def __init__(self, settings: Settings[Batch], number: int) -> None:
        self.delivery = Delivery(settings)
        self.lengths: tuple[int | None, ...] = ()
        self.is_over = False
        self.has_failed = False
        self._number = number
        self._end: Place | None = None
        self._steps: Generator[Batch] | None = None
        self._is_superseded = False

    @property
    def place(self) -> Place | None:
        """Where the loader stands for the user; None if that is where it really stands.

        It does not while it is read ahead, nor when it was left in the middle because other ranks ran out.
        """
        return self._end if self.is_over else self.delivery.ahead.place

    def batches(self, prepare: Callable[[], bool], before: LookAhead[Batch] | None) -> Iterator[Batch]:
        """The batches.

        Args:
            prepare: Puts this rank's loader where the pass is to begin, and tells whether an epoch starts
                there.
            before: The pass before, if it was broken off.

        Raises:
            RuntimeError: A newer iterator was made.
        """
        try:
            opened = open_epoch(self.delivery, prepare, before)
            self.lengths = opened.lengths
            yield from self._deliver(opened)
        except GeneratorExit:
            raise
        except BaseException:
            self.has_failed = not self._is_superseded
            raise

    def supersede(self) -> None:
        """Make way for a newer pass."""
        self._is_superseded = True
        if self._steps is not None:
            self._steps.close()

    def _deliver(self, opened: Opened) -> Iterator[Batch]:
        batches = opened.plan.batches
        if batches is None:
            self._steps = stepwise(self.delivery, opened.flags)
        else:
            self._steps = counted(self.delivery, opened, batches, self._number)
        try:
            for batch in self._steps:
                yield batch
                if self._is_superseded:
                    raise RuntimeError(
                        "a newer iterator of this SynchronizedDataLoader was made; use that one"
                    )
        finally:
            self._steps.close()
        if is_surplus(self.delivery, opened):
            self._leave_rest(opened.plan.epoch)
        self.is_over = True

    def _leave_rest(self, epoch: int | None) -> None:
        """Go on with the next epoch, as the ranks do that have run out."""
        loader = self.delivery.settings.loader
        set_epoch = getattr(loader, "set_epoch", None)
        if epoch is None or not callable(set_epoch):
            self._end = Place(state={})
        elif epoch_of(loader) == epoch:
            set_epoch(epoch + 1)
