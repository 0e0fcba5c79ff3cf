"""Do ranks that should have different data begin with the same batch?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from dist_env import encode_value


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
