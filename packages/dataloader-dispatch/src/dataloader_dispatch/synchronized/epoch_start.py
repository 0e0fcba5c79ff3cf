"""How ranks begin a pass together: lengths and epochs are compared, and the first batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from dataloader_dispatch.batches import Uneven, to_device
from dataloader_dispatch.connection import one_line
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import exact_length, length_of
from dataloader_dispatch.synchronized.exchange import Flags
from dataloader_dispatch.synchronized.prefetch import Delivery, Prefetch, epoch_of
from dist_env import ControlGroup, encode_value

Batch = TypeVar("Batch")


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


def common_length(lengths: Sequence[int | None], uneven: Uneven) -> int | None:
    """Number of batches of an epoch on every rank; None if some loader has no length."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return max(known) if uneven == "pad" else min(known)


def plan(standings: Sequence[Standing], uneven: Uneven, group: ControlGroup) -> Plan:
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


def unequal(has: Sequence[str], group: ControlGroup) -> str:
    """The words of ``uneven="error"`` about what each rank has."""
    told = ", ".join(f"{group.name(index)} has {what}" for index, what in enumerate(has))
    return (
        f"uneven='error': the ranks have different numbers of batches: {told}; divide the data evenly, or "
        "choose uneven='stop' or uneven='pad'"
    )


def left_out(batches: int, has: Sequence[str], group: ControlGroup) -> str:
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


def digest(batch: object) -> str | None:
    """A fingerprint of a batch: equal batches have equal ones, on any rank and device.

    Returns:
        The fingerprint; None for a batch without an element, or one with values of types that are not sent.
    """
    seen = hashlib.blake2b(digest_size=16)
    try:
        elements = _feed(seen, batch)
    except TypeError:
        return None
    return seen.hexdigest() if elements else None


def same_first_batches(digests: Sequence[str | None], ranks: Sequence[int]) -> str | None:
    """What to tell the user about ranks that hold the same first batch; None if there are none.

    Args:
        digests: The fingerprints of the first batches, None where a rank has none.
        ranks: The global ranks, in the same order.
    """
    groups: dict[str, list[int]] = {}
    for rank, fingerprint in zip(ranks, digests, strict=True):
        if fingerprint is not None:
            groups.setdefault(fingerprint, []).append(rank)
    alike = [names for names in groups.values() if len(names) > 1]
    if not alike:
        return None
    found = "; ".join(f"{rank_list(names)} received the same first batch" for names in alike)
    return (
        f"{found}. Every rank is to have data of its own: shard the data by rank (DistributedSampler, "
        "DocumentStream(rank=, world_size=)) or use DataloaderDispatcher"
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as in a sentence: "rank 3", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _feed(seen: hashlib.blake2b, value: object) -> int:
    """Feed a value to a hash; the number of elements in it."""
    if isinstance(value, torch.Tensor):
        seen.update(encode_value(value))
        return value.numel()
    if isinstance(value, Mapping):
        seen.update(f"mapping {len(value)}".encode())
        return sum(_feed_entry(seen, name, item) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        seen.update(f"sequence {len(value)}".encode())
        return sum(_feed(seen, item) for item in value)
    seen.update(encode_value(value))
    return 1


def _feed_entry(seen: hashlib.blake2b, name: object, value: object) -> int:
    seen.update(f"entry {name}".encode())
    return _feed(seen, value)


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
class EpochStart:
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


def start_epoch(
    delivery: Delivery[Batch], prepare: Callable[[], bool], before: Prefetch[Batch] | None
) -> EpochStart:
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
    settings, prefetch = delivery.settings, delivery.prefetch
    group = settings.group
    standing = prefetch.attempt(lambda: standing_of(settings.loader, prepare()))
    standings = settings.group.gather(
        "opening an epoch", standing or Standing(error=one_line(prefetch.error))
    )
    _raise_failures(delivery, [standing.error for standing in standings])
    agreed = plan(standings, settings.uneven, group)
    if group.index in agreed.done:
        prefetch.stand_still()
    else:
        prefetch.start(lambda: _enter_epoch(settings.loader, agreed.epoch), before)
    first = prefetch.attempt(lambda: _first(delivery)) or First(error=one_line(prefetch.error))
    firsts = settings.group.gather("comparing first batches", first)
    _raise_failures(delivery, [first.error for first in firsts])
    same = same_first_batches([first.fingerprint for first in firsts], group.ranks)
    if same is not None:
        settings.warn_once.say("same first batch", same)
    opened = EpochStart(
        agreed, tuple(standing.length for standing in standings), tuple(f.has for f in firsts)
    )
    if settings.uneven == "pad" and any(opened.has) and not all(opened.has):
        _share_template(delivery, opened.has)
    return opened


def _enter_epoch(loader: object, epoch: int | None) -> None:
    if epoch is not None and epoch_of(loader) not in (None, epoch):
        loader.set_epoch(epoch)  # type: ignore[attr-defined]  # a loader with epochs can be set to one


def _first(delivery: Delivery[Batch]) -> First:
    prefetch = delivery.prefetch
    if prefetch.error is not None:
        return First(error=one_line(prefetch.error))
    if not prefetch.has:
        return First()
    if delivery.settings.uneven == "pad":
        # So that batches which cannot be masked are refused before a rank runs out.
        delivery.prepare_dummy(prefetch.first)
    return First(True, digest(prefetch.first))


def _share_template(delivery: Delivery[Batch], has: Sequence[bool]) -> None:
    """Give ranks without a single batch one to make dummies from: the first of the lowest rank with one."""
    settings, group = delivery.settings, delivery.settings.group
    empty = [rank for rank, has_one in zip(group.ranks, has, strict=True) if not has_one]
    settings.warn_once.say(
        f"empty {empty}",
        f"{rank_list(empty)} of {group.size} ranks without a single batch in this pass; batches that do not "
        "count stand in",
    )
    source = has.index(True)
    template = to_device(delivery.prefetch.first, torch.device("cpu")) if group.index == source else None
    received = settings.group.send_batch("sending a batch to ranks without one", template, source)
    if not has[group.index]:
        delivery.prepare_dummy(cast(Batch, to_device(received, settings.device)))


def _raise_failures(delivery: Delivery[Batch], errors: Sequence[str | None]) -> None:
    failed = {index: error for index, error in enumerate(errors) if error is not None}
    if failed:
        delivery.raise_failure(failed)
