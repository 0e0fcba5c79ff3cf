"""How ranks begin a pass together: their epochs and lengths are compared, and the first batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dataloader_dispatch.batches import Uneven
from dataloader_dispatch.connection import BatchCodec
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, encode_value


class EpochFacts(NamedTuple):
    """What a rank tells of its loader before a pass.

    Attributes:
        epoch: Its epoch, if it has one.
        length: Its length, if it has one.
        batches: How many batches it will give in this pass, as far as can be known.
    """

    epoch: int | None
    length: int | None
    batches: int | None


def common_length(lengths: Sequence[int | None], uneven: Uneven) -> int | None:
    """Number of batches of an epoch on every rank; None if some loader has no length."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    return max(known) if uneven == "pad" else min(known)


def common_epoch(
    facts: Sequence[EpochFacts], uneven: Uneven, group: ControlGroup
) -> tuple[int | None, frozenset[int]]:
    """The epoch of a pass, and the positions of the ranks that are through with it already.

    Positions that were saved together may be in two epochs, as some ranks were through with the first one and
    others were not. Under "stop" that epoch is over for all; otherwise the others still have to finish it.

    Raises:
        DataError: Epochs do not fit together, or there are unequal numbers of batches under
            ``uneven="error"``.
    """
    epochs = {each.epoch for each in facts if each.epoch is not None}
    if epochs and max(epochs) - min(epochs) > 1:
        told = ", ".join(f"{group.name(index)} in {each.epoch}" for index, each in enumerate(facts))
        raise DataError(
            f"the loaders of the ranks are in epochs that do not fit together: {told}. Load the states that "
            "were saved together, and call set_epoch with the same epoch on every rank."
        )
    if len(epochs) > 1 and uneven != "stop":
        done = (index for index, each in enumerate(facts) if each.epoch == max(epochs))
        return min(epochs), frozenset(done)
    counts = [each.batches for each in facts]
    if uneven == "error" and len(epochs) < 2 and None not in counts and len(set(counts)) > 1:
        raise DataError(unequal([f"{count} batches" for count in counts], group))
    return max(epochs, default=None), frozenset()


def unequal(has: Sequence[str], group: ControlGroup) -> str:
    """The words of ``uneven="error"`` about what each rank has."""
    return (
        f"uneven='error' needs equal numbers of batches, but {_each(has, group)}. Divide the data evenly, "
        "or choose uneven='stop' or uneven='pad'."
    )


def left_out(batches: int, has: Sequence[str], group: ControlGroup) -> str:
    """The words of ``uneven="stop"`` about what each rank has."""
    return (
        f"uneven='stop': a pass ends after {batches} batches on every rank, the surplus is left out: "
        f"{_each(has, group)}. To use it, divide the data evenly or choose uneven='pad'"
    )


def _each(has: Sequence[str], group: ControlGroup) -> str:
    return ", ".join(f"{group.name(index)} has {what}" for index, what in enumerate(has))


def digest(batch: object) -> str | None:
    """A fingerprint of a batch: equal batches have equal ones, on any rank and device.

    Returns:
        The fingerprint; None for a batch without an element, or one with values of types that are not sent.
    """
    tensors: list[torch.Tensor] = []
    try:
        seen = hashlib.blake2b(BatchCodec().encode(batch, tensors), digest_size=16)
        for tensor in tensors:
            seen.update(encode_value(tensor))
    except (DataError, TypeError):
        return None
    is_empty = bool(tensors) and not any(tensor.numel() for tensor in tensors)
    return None if is_empty else seen.hexdigest()


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
