"""How ranks begin a pass together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from dataloader_dispatch.rank_group import one_line
from dataloader_dispatch.synchronized.ahead import LookAhead, epoch_of
from dataloader_dispatch.synchronized.delivery import Delivery
from dataloader_dispatch.synchronized.exchange import Flags
from dataloader_dispatch.synchronized.first_batch import digest, rank_list, same_first_batches
from dataloader_dispatch.synchronized.move import to_device
from dataloader_dispatch.synchronized.opening import Plan, Standing, plan, standing_of

Batch = TypeVar("Batch")


class First(NamedTuple):
    """What a rank says of its first batch.

    Attributes:
        has: Whether it has one.
        fingerprint: Equal for equal batches; None where that cannot be told.
        error: What went wrong.
    """

    has: bool = False
    fingerprint: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Opened:
    """What the ranks have agreed on.

    Attributes:
        plan: What they do.
        lengths: Lengths of the loaders, None for those without.
        has: Whether each rank has a first batch.
    """

    plan: Plan
    lengths: tuple[int | None, ...]
    has: tuple[bool, ...]

    @property
    def flags(self) -> Flags:
        """What is true of some rank before the first batch."""
        return Flags(any(self.has), not all(self.has), False)


def open_epoch(
    delivery: Delivery[Batch], prepare: Callable[[], bool], before: LookAhead[Batch] | None
) -> Opened:
    """Meet the other ranks, begin the pass and compare first batches. Collective.

    Args:
        delivery: This rank's batches.
        prepare: Puts this rank's loader where the pass is to begin, and tells whether that is the start of an
            epoch.
        before: The pass before, if it was broken off.

    Raises:
        DataError: Epochs do not fit together, or there are unequal lengths under ``uneven="error"``.
        RankFailedError: The loader of another rank failed.
    """
    settings, ahead = delivery.settings, delivery.ahead
    group = settings.group
    standing = ahead.attempt(lambda: standing_of(settings.loader, prepare()))
    standings = settings.exchange.gather(
        "opening an epoch", standing or Standing(error=one_line(ahead.error))
    )
    _raise_failures(delivery, [standing.error for standing in standings])
    agreed = plan(standings, settings.uneven, group)
    if group.index in agreed.done:
        ahead.stand_still()
    else:
        ahead.start(lambda: _enter_epoch(settings.loader, agreed.epoch), before)
    first = ahead.attempt(lambda: _first(delivery)) or First(error=one_line(ahead.error))
    firsts = settings.exchange.gather("comparing first batches", first)
    _raise_failures(delivery, [first.error for first in firsts])
    same = same_first_batches([first.fingerprint for first in firsts], group.ranks)
    if same is not None:
        settings.notices.say("same first batch", same)
    opened = Opened(agreed, tuple(standing.length for standing in standings), tuple(f.has for f in firsts))
    if settings.uneven == "pad" and any(opened.has) and not all(opened.has):
        _share_template(delivery, opened.has)
    return opened


def _enter_epoch(loader: object, epoch: int | None) -> None:
    if epoch is not None and epoch_of(loader) not in (None, epoch):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]  # a loader with epochs can be set to one


def _first(delivery: Delivery[Batch]) -> First:
    ahead = delivery.ahead
    if ahead.error is not None:
        return First(error=one_line(ahead.error))
    if not ahead.has:
        return First()
    if delivery.settings.uneven == "pad":
        # So that batches which cannot be masked are refused before a rank runs out.
        delivery.prepare_dummy(ahead.first)
    return First(True, digest(ahead.first))


def _share_template(delivery: Delivery[Batch], has: Sequence[bool]) -> None:
    """Give ranks without a single batch one to make dummies from: the first of the lowest rank with one."""
    settings, group = delivery.settings, delivery.settings.group
    empty = [rank for rank, has_one in zip(group.ranks, has, strict=True) if not has_one]
    settings.notices.say(
        f"empty {empty}",
        f"{rank_list(empty)} of {group.size} ranks without a single batch in this pass; batches that do not "
        "count stand in",
    )
    source = has.index(True)
    template = to_device(delivery.ahead.first, torch.device("cpu")) if group.index == source else None
    received = settings.exchange.broadcast("sending a batch to ranks without one", template, source)
    if not has[group.index]:
        delivery.prepare_dummy(cast(Batch, to_device(received, settings.device)))


def _raise_failures(delivery: Delivery[Batch], errors: Sequence[str | None]) -> None:
    failed = {index: error for index, error in enumerate(errors) if error is not None}
    if failed:
        delivery.raise_failure(failed)
