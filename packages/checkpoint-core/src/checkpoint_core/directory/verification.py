"""Proof that a checkpoint is whole, divided among the ranks: each reads its share of the bytes once."""

import errno
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from checkpoint_core.directory.discovery import wrong_content
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.ranks.agreement import RankAgreement
from checkpoint_core.storage.checksum import combine
from checkpoint_core.storage.files import range_share
from checkpoint_core.storage.parallel import in_threads

_UNREADABLE = 1 << 32
"""The share of bytes that the disk can no longer read; it fits no checksum of 32 bits."""
_Range = tuple[str, int, int]


def verify_together(ranks: RankAgreement, phase: str, directory: Path, manifest: Manifest) -> None:
    """Compare the checksums of all files. Collective.

    Args:
        ranks: The ranks; those of a site read its checkpoint together.
        phase: What is being done, for messages.
        directory: The checkpoint.
        manifest: Its manifest.

    Raises:
        CheckpointError: On every rank: a file is damaged; names it.
    """
    _compare(ranks, phase, directory, manifest, ranks.run(phase, lambda: _shares(ranks, directory, manifest)))


def _compare(
    ranks: RankAgreement, phase: str, directory: Path, manifest: Manifest, shares: Sequence[dict[str, int]]
) -> None:
    mine = [shares[rank] for rank in ranks.site]

    def compare() -> None:
        if not ranks.is_leader:
            return
        for name, record in manifest.files.items():
            found = [share[name] for share in mine if name in share]
            if found and combine(found) != record.checksum:
                raise wrong_content(directory / name)

    ranks.run(phase, compare)


def damage(ranks: RankAgreement, phase: str, directory: Path, manifest: Manifest) -> CheckpointError | None:
    """Like :func:`verify_together`, with the error as the result.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        directory: The checkpoint.
        manifest: Its manifest.

    Returns:
        The error, or None for a checkpoint that is whole.

    Raises:
        CheckpointError: On every rank: nothing can be told, because a rank could not read.
    """
    # Outside: too many open files, say, are no damage, and no reason to go back to an older checkpoint.
    shares = ranks.run(phase, lambda: _shares(ranks, directory, manifest))
    try:
        _compare(ranks, phase, directory, manifest, shares)
    except CheckpointError as error:
        if ranks.broken:
            raise
        return error
    return None


def _shares(ranks: RankAgreement, directory: Path, manifest: Manifest) -> dict[str, int]:
    present = {name: record for name, record in manifest.files.items() if (directory / name).is_file()}
    total = sum(record.size for record in present.values())
    place = ranks.rank - ranks.leader
    begin, end = total * place // ranks.site_size, total * (place + 1) // ranks.site_size
    bounds = [begin + (end - begin) * number // ranks.threads for number in range(ranks.threads + 1)]
    sizes = {name: record.size for name, record in present.items()}
    stripes = [_ranges(sizes, a, b) for a, b in pairwise(bounds)]

    def read(some: Sequence[list[_Range]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, first, last in (entry for stripe in some for entry in stripe):
            share = _range_share(directory / name, first, last, sizes[name])
            found[name] = found.get(name, 0) ^ share
        return found

    merged: dict[str, int] = {}
    for part in in_threads(ranks.threads, stripes, read):
        for name, share in part.items():
            merged[name] = merged.get(name, 0) ^ share
    return merged


def _range_share(path: Path, first: int, last: int, size: int) -> int:
    try:
        return range_share(path, first, last, size)
    except OSError as error:
        if error.errno == errno.EIO:
            return _UNREADABLE
        raise


def _ranges(sizes: dict[str, int], begin: int, end: int) -> list[_Range]:
    """The part of each file that lies in a range of all files, one behind the other."""
    result = []
    position = 0
    for name, size in sizes.items():
        first, last = max(begin - position, 0), min(end - position, size)
        if first < last:
            result.append((name, first, last))
        position += size
    return result
