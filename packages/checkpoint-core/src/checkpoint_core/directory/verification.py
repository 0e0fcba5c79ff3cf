"""Proof that a checkpoint is whole, divided among the ranks: each reads its share of the bytes once."""

import errno
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from checkpoint_core.directory.discovery import wrong_content
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.ranks.agreement import RankAgreement
from checkpoint_core.storage.checksum import combine
from checkpoint_core.storage.files import range_share
from checkpoint_core.storage.parallel import in_threads

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What this process or machine has run out of says nothing of the files."""
_Range = tuple[str, int, int]


class _Read(TypedDict):
    """What one rank found in its part of the files."""

    shares: dict[str, int]
    """Contribution to the checksum of each file."""
    problem: str | None
    """Why a file cannot be read."""


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
    _compare(ranks, phase, directory, manifest, ranks.run(phase, lambda: _read(ranks, directory, manifest)))


def _compare(
    ranks: RankAgreement, phase: str, directory: Path, manifest: Manifest, reads: Sequence[_Read]
) -> None:
    mine = [reads[rank]["shares"] for rank in ranks.site]

    def compare() -> None:
        if (problem := reads[ranks.rank]["problem"]) is not None:
            raise CheckpointError(problem)
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
        CheckpointError: On every rank: nothing can be told, because a rank has run out of memory or files.
    """
    # Outside: too many open files, say, are no damage, and no reason to go back to an older checkpoint.
    reads = ranks.run(phase, lambda: _read(ranks, directory, manifest))
    try:
        _compare(ranks, phase, directory, manifest, reads)
    except CheckpointError as error:
        if ranks.broken:
            raise
        return error
    return None


def _read(ranks: RankAgreement, directory: Path, manifest: Manifest) -> _Read:
    try:
        return _Read(shares=_shares(ranks, directory, manifest), problem=None)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return _Read(shares={}, problem=describe_error(error))


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
            share = range_share(directory / name, first, last, sizes[name])
            found[name] = found.get(name, 0) ^ share
        return found

    merged: dict[str, int] = {}
    for part in in_threads(ranks.threads, stripes, read):
        for name, share in part.items():
            merged[name] = merged.get(name, 0) ^ share
    return merged


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
