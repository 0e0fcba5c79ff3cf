"""What ranks agree on before the first batch of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import RankGroup
from dataloader_dispatch.synchronized.ahead import epoch_of

Uneven = Literal["stop", "pad", "error"]


class Standing(NamedTuple):
    """What a rank says of its loader before an epoch.

    Attributes:
        epoch: Its epoch, if it tells.
        length: Its length, if it has one.
        is_exact: Whether the coming epoch has exactly that many batches, as far as can be known.
        error: Why it cannot say.
    """

    epoch: int | None = None
    length: int | None = None
    is_exact: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Plan:
    """What the ranks do in an epoch.

    Attributes:
        batches: Number of batches of the epoch on every rank; None if it will show.
        epoch: The epoch that every rank is to be in; None where loaders do not tell theirs.
        done: Positions of the ranks that are through with that epoch already.
    """

    batches: int | None
    epoch: int | None
    done: frozenset[int]


def standing_of(loader: object, is_whole: bool) -> Standing:
    """What this rank says.

    Args:
        loader: Its loader.
        is_whole: Whether the coming epoch begins at its start.
    """
    return Standing(epoch_of(loader), length_of(loader), is_whole and exact_length(loader) is not None)


def exact_length(loader: object) -> int | None:
    """The length of a loader; None if it has none, or only a guess."""
    # torch calls the length of a loader of an iterable dataset a guess.
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    return length_of(loader)


def length_of(loader: object) -> int | None:
    """The length of a loader; None if it has none."""
    if not hasattr(loader, "__len__"):
        return None
    try:
        return len(loader)
    except TypeError:  # A torch loader of an iterable dataset.
        return None


def common_length(lengths: Sequence[int | None], uneven: Uneven) -> int | None:
    """Number of batches of an epoch on every rank; None if some loader has no length."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return max(known) if uneven == "pad" else min(known)


def plan(standings: Sequence[Standing], uneven: Uneven, group: RankGroup) -> Plan:
    """What the ranks do, the same on each of them.

    Raises:
        DataError: Epochs do not fit together, or there are unequal lengths under ``uneven="error"``.
    """
    epochs = {standing.epoch for standing in standings if standing.epoch is not None}
    if epochs and max(epochs) - min(epochs) > 1:
        told = ", ".join(f"{group.name(i)} in {standing.epoch}" for i, standing in enumerate(standings))
        raise DataError(
            f"the loaders of the ranks are in epochs that do not fit together: {told}; load the states that "
            "were saved together, and call set_epoch with the same epoch on every rank"
        )
    if len(epochs) > 1:
        return _after_resume(standings, epochs, uneven)
    lengths = [standing.length for standing in standings]
    if not all(standing.is_exact for standing in standings):
        return Plan(None, next(iter(epochs), None), frozenset())
    if uneven == "error" and len(set(lengths)) > 1:
        raise DataError(unequal([f"{length} batches" for length in lengths], group))
    return Plan(common_length(lengths, uneven), next(iter(epochs), None), frozenset())


def unequal(has: Sequence[str], group: RankGroup) -> str:
    """The words of ``uneven="error"`` about what each rank has."""
    told = ", ".join(f"{group.name(index)} has {what}" for index, what in enumerate(has))
    return (
        f"uneven='error': the ranks have different numbers of batches: {told}; divide the data evenly, or "
        "choose uneven='stop' or uneven='pad'"
    )


def left_out(batches: int, has: Sequence[str], group: RankGroup) -> str:
    """The words of ``uneven="stop"`` about what each rank has."""
    told = ", ".join(f"{group.name(index)} has {what}" for index, what in enumerate(has))
    return (
        f"uneven='stop': a pass ends after {batches} batches on every rank, the surplus is left out: {told}. "
        f"To use it, divide the data evenly or choose uneven='pad'"
    )


def _after_resume(standings: Sequence[Standing], epochs: set[int], uneven: Uneven) -> Plan:
    """The states were saved when some ranks were through with an epoch, and others were not.

    Under "stop" that epoch is over for all; otherwise the others still have to finish it.
    """
    if uneven == "stop":
        return Plan(None, max(epochs), frozenset())
    done = {index for index, standing in enumerate(standings) if standing.epoch == max(epochs)}
    return Plan(None, min(epochs), frozenset(done))
