"""Fingerprints of batches: whether ranks have the same, where they must or must not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dataloader_dispatch.connection import BatchCodec
from dataloader_dispatch.errors import DataError
from dist_env import encode_value

_DIGEST = 8
END = "end"
"""In place of the fingerprint of a batch, where there is none any more."""


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


def encoded_digests(found: str, position: int | None, count: int) -> bytes:
    """A fingerprint for `start_flags`, in the place of those that must have the same.

    The largest bytes of all ranks tell whether all are equal: of each byte they hold its complement, too, and
    the two add up to 255 only if it is the same everywhere.

    Args:
        found: The fingerprint; empty for a rank that has none, and agrees with any.
        position: Which of the sets of ranks this rank is in, if it is in one.
        count: How many sets there are.
    """
    places = bytearray(2 * _DIGEST * count)
    if position is not None and found:
        own = hashlib.blake2b(found.encode(), digest_size=_DIGEST).digest()
        start = 2 * _DIGEST * position
        places[start : start + 2 * _DIGEST] = own + bytes(255 - byte for byte in own)
    return bytes(places)


def digests_differ(largest: bytes) -> bool:
    """Whether ranks of some set have unlike fingerprints, by the largest bytes of all ranks."""
    pairs = (
        (largest[start + place], largest[start + _DIGEST + place])
        for start in range(0, len(largest), 2 * _DIGEST)
        for place in range(_DIGEST)
    )
    return any(sum(pair) not in (0, 255) for pair in pairs)


def unlike_batches(
    found: Sequence[str], equal: Sequence[Sequence[int]], ranks: Sequence[int], number: int
) -> str | None:
    """What to tell about ranks whose batches must be the same and are not; None if all are.

    Args:
        found: The fingerprints, empty where one cannot be taken.
        equal: Global ranks that must have the same batches.
        ranks: The global ranks, in the order of `found`.
        number: Which batch of the pass it is, from 1.
    """
    by_rank = dict(zip(ranks, found, strict=True))
    told = []
    for members in equal:
        groups: dict[str, list[int]] = {}
        for rank in members:
            if by_rank.get(rank):
                groups.setdefault(by_rank[rank], []).append(rank)
        if len(groups) > 1:
            parts = " and ".join(
                f"{rank_list(alike)} {'have' if len(alike) > 1 else 'has'} "
                f"{'no further one' if name == END else 'one'}"
                for name, alike in groups.items()
            )
            told.append(f"{rank_list(members)} must have the same batches, but of batch {number} {parts}")
    if not told:
        return None
    return (
        f"{'; '.join(told)} of {'its' if len(told) == 1 else 'their'} own. Give these ranks loaders of the "
        "same data, seed and order: divide data by `layout.data_rank(rank)` of `layout.data_count`, and not "
        "by the number of the rank. Or let one rank read for all."
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks as in a sentence: "rank 3", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
