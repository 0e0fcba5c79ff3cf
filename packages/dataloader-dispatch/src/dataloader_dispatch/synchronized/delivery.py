"""The batches that one rank delivers in a pass, real ones and those that stand in for missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import torch

from dataloader_dispatch.rank_group import RankGroup
from dataloader_dispatch.synchronized.ahead import LookAhead
from dataloader_dispatch.synchronized.exchange import Exchange
from dataloader_dispatch.synchronized.move import copy_of
from dataloader_dispatch.synchronized.notices import Notices
from dataloader_dispatch.synchronized.opening import Uneven
from dist_env import RankFailedError

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Settings(Generic[Batch]):
    """What stays the same in every pass.

    Attributes:
        loader: This rank's loader.
        device: Where batches go.
        group: The ranks, at least two.
        exchange: Exchanges between them.
        uneven: What to do when ranks run out.
        make_dummy: Makes a batch that stands in for a missing one, under ``uneven="pad"``.
        notices: What the user was told.
    """

    loader: Iterable[Batch]
    device: torch.device
    group: RankGroup
    exchange: Exchange
    uneven: Uneven
    make_dummy: Callable[[Batch], Batch]
    notices: Notices


class Delivery(Generic[Batch]):
    """The batches of this rank in one pass.

    Args:
        settings: What stays the same in every pass.

    Attributes:
        ahead: The loader.
        is_dummy: Whether the last batch delivered stands in for a missing one.
    """

    def __init__(self, settings: Settings[Batch]) -> None:
        self.settings = settings
        self.ahead = LookAhead(settings.loader, settings.device, settings.exchange.take_interruption)
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
        ahead = self.ahead
        self.is_dummy = not ahead.has
        if self.is_dummy:
            return copy_of(self._dummy)  # type: ignore[return-value]  # one was prepared
        batch = ahead.take()
        if fetch:
            ahead.fetch()
            if self.settings.uneven == "pad" and not ahead.has and ahead.error is None:
                ahead.attempt(lambda: self.prepare_dummy(batch))
        return batch

    def raise_failure(self, errors: dict[int, str]) -> NoReturn:
        """Raise what this rank's loader raised, or else that others failed.

        Args:
            errors: What the loaders raised, by position of the rank.
        """
        if self.ahead.error is not None:
            raise self.ahead.error
        group = self.settings.group
        told = "; ".join(f"{group.name(index)} failed: {text}" for index, text in errors.items())
        raise RankFailedError(f"loading data: {told}. Look at the log of that rank", group.ranks[min(errors)])
