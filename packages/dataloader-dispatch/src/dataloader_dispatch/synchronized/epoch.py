"""One pass of several ranks over their loaders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Generic, NoReturn, TypeVar

from dataloader_dispatch.connection import one_line
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.synchronized.epoch_start import EpochStart, left_out, start_epoch, unequal
from dataloader_dispatch.synchronized.exchange import Alarm, FailureSignal, Flags
from dataloader_dispatch.synchronized.prefetch import Delivery, Place, Prefetch, Settings, epoch_of
from dist_env import RankFailedError

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
        return self._end if self.is_over else self.delivery.prefetch.place

    def batches(self, prepare: Callable[[], bool], before: Prefetch[Batch] | None) -> Iterator[Batch]:
        """The batches.

        Args:
            prepare: Puts this rank's loader where the pass is to begin, and tells whether an epoch starts
                there.
            before: The pass before, if it was broken off.

        Raises:
            RuntimeError: A newer iterator was made.
        """
        try:
            opened = start_epoch(self.delivery, prepare, before)
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

    def _deliver(self, opened: EpochStart) -> Iterator[Batch]:
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


def counted(delivery: Delivery[Batch], opened: EpochStart, batches: int, number: int) -> Generator[Batch]:
    """The batches of a pass whose length was agreed on. While all goes well nothing is exchanged.

    Args:
        delivery: This rank's batches.
        opened: What the ranks have agreed on.
        batches: Number of batches on every rank.
        number: Number of the pass, the same on all ranks.

    Raises:
        DataError: A loader ended before its length, unless ``uneven="pad"``.
        RankFailedError: The loader of another rank failed, or a rank is lost.
    """
    group, prefetch = delivery.settings.group, delivery.prefetch
    own = _own_length(opened, group.index)
    _check_beginning(delivery, opened, batches)
    _tell_lengths(delivery, opened, batches)
    closing = delivery.settings.group
    with FailureSignal(group, number) as signal:
        trouble: Alarm | None = None
        for count in range(1, batches + 1):
            if alarm := trouble or signal.alarm:
                closing.start_flags(has=False, failed=True)
                _raise(delivery, alarm)
            batch = delivery.next(fetch=own <= batches or count < batches)
            if not delivery.is_dummy and not prefetch.has and (trouble := _trouble(delivery, own, count)):
                signal.raise_alarm(trouble)
            yield batch
            del batch  # its memory is the caller's to free while the next one is fetched
        # Ranks whose users exchange nothing may be here long before another one gets into trouble.
        closing.start_flags(has=False, failed=trouble is not None)
        if trouble:
            _raise(delivery, trouble)
        if closing.wait_flags().failed and (alarm := signal.look()):
            _raise(delivery, alarm)
    if own <= batches and prefetch.has:
        delivery.settings.warn_once.say_here(
            f"the loader goes on after the {own} batches of its len(); the rest is left out"
        )


def is_surplus(delivery: Delivery[Batch], opened: EpochStart) -> bool:
    """Whether this rank's loader was left before its end."""
    batches = opened.plan.batches
    if batches is None:
        return delivery.prefetch.has
    return delivery.prefetch.has or _own_length(opened, delivery.settings.group.index) > batches


def _own_length(opened: EpochStart, index: int) -> int:
    length = opened.lengths[index]
    return 0 if length is None else length


def _check_beginning(delivery: Delivery[Batch], opened: EpochStart, batches: int) -> None:
    """Refuse loaders that have a length and not a single batch."""
    if batches == 0 or all(opened.has) or (delivery.settings.uneven == "pad" and any(opened.has)):
        return
    index = opened.has.index(False)
    raise DataError(_too_short(delivery, index, 0, _own_length(opened, index)))


def _tell_lengths(delivery: Delivery[Batch], opened: EpochStart, batches: int) -> None:
    settings = delivery.settings
    if settings.uneven == "stop" and len(set(opened.lengths)) > 1:
        has = [f"{length} batches" for length in opened.lengths]
        settings.warn_once.say("uneven", left_out(batches, has, settings.group))


def _trouble(delivery: Delivery[Batch], own: int, count: int) -> Alarm | None:
    """What is wrong, now that this rank has no batch after ``count``."""
    prefetch, settings = delivery.prefetch, delivery.settings
    index = settings.group.index
    if prefetch.error is not None:
        return Alarm(index, one_line(prefetch.error), True)
    if count >= own:
        return None
    text = _too_short(delivery, index, count, own)
    if settings.uneven == "pad":
        settings.warn_once.say_here(text)
        return None
    return Alarm(index, text, False)


def _too_short(delivery: Delivery[Batch], index: int, count: int, length: int) -> str:
    return (
        f"the loader of {delivery.settings.group.name(index)} ended after {count} batches, but its len() "
        f"is {length}. Correct its __len__, or remove it: without one the ranks agree step by step. Load "
        "positions into the SynchronizedDataLoader, not into the loader in it"
    )


def _raise(delivery: Delivery[Batch], alarm: Alarm) -> NoReturn:
    if alarm.is_failure:
        delivery.raise_failure({alarm.index: alarm.text})
    raise DataError(alarm.text)


def stepwise(delivery: Delivery[Batch], flags: Flags) -> Generator[Batch]:
    """The batches of a pass whose end shows one batch ahead.

    Args:
        delivery: This rank's batches.
        flags: What is true before the first batch.

    Raises:
        DataError: Ranks run out before others under ``uneven="error"``.
        RankFailedError: The loader of another rank failed, or a rank is lost.
    """
    uneven, prefetch = delivery.settings.uneven, delivery.prefetch
    exchange = delivery.settings.group
    while True:
        if flags.failed:
            _fail(delivery)
        if flags.ended and (not flags.has or uneven != "pad"):
            break
        batch = delivery.next(fetch=True)
        exchange.start_flags(has=prefetch.has, failed=prefetch.error is not None)
        yield batch
        del batch  # its memory is the caller's to free while the next one is waited for
        flags = exchange.wait_flags()
    if flags.has:
        _end_uneven(delivery)


def _fail(delivery: Delivery[Batch]) -> NoReturn:
    error = delivery.prefetch.error
    text = None if error is None else one_line(error)
    try:
        texts = delivery.settings.group.gather("telling what failed", text)
    except RankFailedError:
        if error is None:
            raise
        raise error from None  # another rank is lost as well, but this is what happened here
    delivery.raise_failure({index: text for index, text in enumerate(texts) if text is not None})


def _end_uneven(delivery: Delivery[Batch]) -> None:
    settings, prefetch = delivery.settings, delivery.prefetch
    if settings.uneven == "stop" and settings.warn_once.was_said("uneven"):
        return
    counts = settings.group.gather("comparing the ends of the data", (prefetch.taken, prefetch.has))
    has = [f"more than {taken} batches" if more else f"{taken} batches" for taken, more in counts]
    if settings.uneven == "error":
        raise DataError(unequal(has, settings.group))
    settings.warn_once.say("uneven", left_out(prefetch.taken, has, settings.group))
