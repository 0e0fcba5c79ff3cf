"""A pass of ranks that do not know how many batches there are."""

from __future__ import annotations

from collections.abc import Generator
from typing import NoReturn, TypeVar

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import one_line
from dataloader_dispatch.synchronized.delivery import Delivery
from dataloader_dispatch.synchronized.exchange import Flags
from dataloader_dispatch.synchronized.opening import left_out, unequal
from dist_env import RankFailedError

Batch = TypeVar("Batch")


def stepwise(delivery: Delivery[Batch], flags: Flags) -> Generator[Batch]:
    """The batches of a pass whose end shows one batch ahead.

    Args:
        delivery: This rank's batches.
        flags: What is true before the first batch.

    Raises:
        DataError: Ranks run out before others under ``uneven="error"``.
        RankFailedError: The loader of another rank failed, or a rank is lost.
    """
    uneven, ahead = delivery.settings.uneven, delivery.ahead
    exchange = delivery.settings.exchange
    while True:
        if flags.failed:
            _fail(delivery)
        if flags.ended and (not flags.has or uneven != "pad"):
            break
        batch = delivery.next(fetch=True)
        exchange.start_flags(has=ahead.has, failed=ahead.error is not None)
        yield batch
        del batch  # its memory is the caller's to free while the next one is waited for
        flags = exchange.wait_flags()
    if flags.has:
        _end_uneven(delivery)


def _fail(delivery: Delivery[Batch]) -> NoReturn:
    error = delivery.ahead.error
    text = None if error is None else one_line(error)
    try:
        texts = delivery.settings.exchange.gather("telling what failed", text)
    except RankFailedError:
        if error is None:
            raise
        raise error from None  # another rank is lost as well, but this is what happened here
    delivery.raise_failure({index: text for index, text in enumerate(texts) if text is not None})


def _end_uneven(delivery: Delivery[Batch]) -> None:
    settings, ahead = delivery.settings, delivery.ahead
    if settings.uneven == "stop" and settings.notices.was_said("uneven"):
        return
    counts = settings.exchange.gather("comparing the ends of the data", (ahead.taken, ahead.has))
    has = [f"more than {taken} batches" if more else f"{taken} batches" for taken, more in counts]
    if settings.uneven == "error":
        raise DataError(unequal(has, settings.group))
    settings.notices.say("uneven", left_out(ahead.taken, has, settings.group))
