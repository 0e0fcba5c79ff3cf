"""A pass of ranks that know how many batches there are."""

from __future__ import annotations

from collections.abc import Generator
from typing import NoReturn, TypeVar

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import one_line
from dataloader_dispatch.synchronized.delivery import Delivery
from dataloader_dispatch.synchronized.meeting import Opened
from dataloader_dispatch.synchronized.opening import left_out
from dataloader_dispatch.synchronized.watch import Alarm, Watch

Batch = TypeVar("Batch")


def counted(delivery: Delivery[Batch], opened: Opened, batches: int, number: int) -> Generator[Batch]:
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
    group, ahead = delivery.settings.group, delivery.ahead
    own = _own_length(opened, group.index)
    _check_beginning(delivery, opened, batches)
    _tell_lengths(delivery, opened, batches)
    closing = delivery.settings.exchange
    with Watch(group, number) as watch:
        trouble: Alarm | None = None
        for count in range(1, batches + 1):
            if alarm := trouble or watch.alarm:
                closing.start_flags(has=False, failed=True)
                _raise(delivery, alarm)
            batch = delivery.next(fetch=own <= batches or count < batches)
            if not delivery.is_dummy and not ahead.has and (trouble := _trouble(delivery, own, count)):
                watch.raise_alarm(trouble)
            yield batch
            del batch  # its memory is the caller's to free while the next one is fetched
        # Ranks whose users exchange nothing may be here long before another one gets into trouble.
        closing.start_flags(has=False, failed=trouble is not None)
        if trouble:
            _raise(delivery, trouble)
        if closing.wait_flags().failed and (alarm := watch.look()):
            _raise(delivery, alarm)
    if own <= batches and ahead.has:
        delivery.settings.notices.say_here(
            f"the loader goes on after the {own} batches of its len(); the rest is left out"
        )


def is_surplus(delivery: Delivery[Batch], opened: Opened) -> bool:
    """Whether this rank's loader was left before its end."""
    batches = opened.plan.batches
    if batches is None:
        return delivery.ahead.has
    return delivery.ahead.has or _own_length(opened, delivery.settings.group.index) > batches


def _own_length(opened: Opened, index: int) -> int:
    length = opened.lengths[index]
    return 0 if length is None else length


def _check_beginning(delivery: Delivery[Batch], opened: Opened, batches: int) -> None:
    """Refuse loaders that have a length and not a single batch."""
    if batches == 0 or all(opened.has) or (delivery.settings.uneven == "pad" and any(opened.has)):
        return
    index = opened.has.index(False)
    raise DataError(_too_short(delivery, index, 0, _own_length(opened, index)))


def _tell_lengths(delivery: Delivery[Batch], opened: Opened, batches: int) -> None:
    settings = delivery.settings
    if settings.uneven == "stop" and len(set(opened.lengths)) > 1:
        has = [f"{length} batches" for length in opened.lengths]
        settings.notices.say("uneven", left_out(batches, has, settings.group))


def _trouble(delivery: Delivery[Batch], own: int, count: int) -> Alarm | None:
    """What is wrong, now that this rank has no batch after ``count``."""
    ahead, settings = delivery.ahead, delivery.settings
    index = settings.group.index
    if ahead.error is not None:
        return Alarm(index, one_line(ahead.error), True)
    if count >= own:
        return None
    text = _too_short(delivery, index, count, own)
    if settings.uneven == "pad":
        settings.notices.say_here(text)
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
