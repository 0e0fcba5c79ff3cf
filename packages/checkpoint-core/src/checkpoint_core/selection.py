"""Which checkpoint of an output directory, or of two tiers, is loaded."""

import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.directory import (
    STAGING,
    checkpoint_directories,
    checkpoint_path,
    find_leftovers,
    publish,
    restore_replaced,
)
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import combine, in_threads, range_share
from checkpoint_core.manifest import MANIFEST_NAME, Manifest, read_manifest, verify_checkpoint, wrong_content
from checkpoint_core.store_path import StorePath, file_sizes, locate, reading_threads
from dist_env import StoreError

_logger = logging.getLogger(__name__)
_PHASE = "choosing a checkpoint"
_Save = tuple[int, str]
"""Step and id of a save."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What this process or machine has run out of says nothing of the files."""
_Range = tuple[str, int, int]


def find_latest_checkpoint(
    output_dir: str | Path, *, remote_dir: str | Path | None = None, verify_checksums: bool = False
) -> Path | None:
    """The committed checkpoint with the highest step.

    Each torn or damaged checkpoint that is passed over is named in a warning. A component file that the user
    deleted does not disqualify a checkpoint.

    Args:
        output_dir: The directory that holds ``checkpoint-<step>`` directories, or its address in a store.
        remote_dir: The address of a second tier, which is looked through as well; a step that both hold is
            taken from ``output_dir``.
        verify_checksums: Read every file and compare its digest. Without it sizes are compared, which finds
            truncated files at the cost of a directory listing.

    Returns:
        The checkpoint's directory, or None when there is none.

    Raises:
        StoreError: The object store cannot be asked, which says nothing of its checkpoints.
    """
    best: tuple[int, Path] | None = None
    for tier in [output_dir] if remote_dir is None else [output_dir, remote_dir]:
        found = next(_good_checkpoints(locate(tier), checksums=verify_checksums), None)
        if found is not None and (best is None or found[1].step > best[0]):
            best = found[1].step, found[0]
    return None if best is None else best[1]


def _good_checkpoints(output_dir: Path, *, checksums: bool) -> Iterator[tuple[Path, Manifest]]:
    """Committed checkpoints that pass verification, highest step first; the others are named in warnings."""
    restore_replaced(output_dir)
    for step, path in checkpoint_directories(output_dir):
        try:
            manifest = verify_checkpoint(path, checksums=checksums)
            if manifest.step != step:
                raise CheckpointError(
                    f"{path} holds step {manifest.step}, not {step}, so it was renamed. Give it its name "
                    "back."
                )
        except StoreError:
            raise  # Says nothing of the checkpoint: an older one must not be taken for it.
        except (CheckpointError, OSError) as error:
            _warn_passing_over(path, error)
            continue
        yield path, manifest


def _warn_passing_over(path: Path, error: Exception) -> None:
    _logger.warning("passing over %s: %s", path.name, error)


def select_checkpoint(
    ranks: RankAgreement, output_dir: Path, path: Path | None, remote_dir: Path | None = None
) -> tuple[Path, Manifest] | None:
    """Choose a checkpoint and verify it together. Collective.

    Args:
        ranks: The ranks.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest that is good on every node.
        remote_dir: A second tier, in a store; a step that both hold is taken from ``output_dir``.

    Returns:
        Directory and manifest, or None when ``path`` is None and there is no checkpoint.

    Raises:
        CheckpointError: On every rank: the named checkpoint is missing or damaged, or the nodes have no
            checkpoint in common.
    """
    output_dir = output_dir.absolute()
    if len(ranks.sites()) > 1:
        _finish_publishing(ranks, output_dir)
    if path is None:
        return _newest(ranks, output_dir, remote_dir)
    return _named(ranks, output_dir, path.absolute(), remote_dir)


def _finish_publishing(ranks: RankAgreement, output_dir: Path) -> None:
    """Publish on every node what another node has published. Collective.

    The first node publishes when all nodes have all files of the save, and with that it is committed. A node
    that was killed before its own turn catches up here.
    """

    def look() -> tuple[list[_Save], dict[str, _Save]]:
        return (_saves(output_dir), _unpublished(output_dir)) if ranks.is_leader else ([], {})

    found = ranks.run(_PHASE, look)
    published = {_save(entry) for saves, _ in found for entry in saves}

    def publish_all() -> None:
        for name, entry in found[ranks.rank][1].items():
            if _save(entry) in published:
                step = entry[0]
                _logger.warning("committing checkpoint-%d, as another node did before the job ended", step)
                publish(output_dir / name, checkpoint_path(output_dir, step), step)

    ranks.run(_PHASE, publish_all)


def _unpublished(output_dir: Path) -> dict[str, _Save]:
    """Saves of killed processes that lack nothing but the publishing, by directory."""
    found = {}
    for leftover in find_leftovers(output_dir):
        if leftover.kind == STAGING and leftover.is_abandoned():
            try:
                manifest = verify_checkpoint(leftover.path, checksums=False)
            except (CheckpointError, OSError):
                continue  # Killed while it was being written.
            found[leftover.path.name] = (manifest.step, manifest.save_id)
    return found


def _named(
    ranks: RankAgreement, output_dir: Path, path: Path, remote_dir: Path | None
) -> tuple[Path, Manifest]:
    def check() -> None:
        if not (path / MANIFEST_NAME).is_file() and checkpoint_directories(path):
            newest = checkpoint_directories(path)[0][1]
            raise CheckpointError(
                f"{path} contains checkpoints but is not one itself. Pass one of them, such as {newest}."
            )
        verify_checkpoint(path, checksums=False)

    ranks.run_on_leaders(_PHASE, check)
    manifest = _read_everywhere(ranks, path)
    _compare(ranks, path, manifest, _read_shares(ranks, path, manifest))
    tiers = [output_dir] if remote_dir is None else [output_dir, remote_dir]
    if path.parent.resolve() in [tier.resolve() for tier in tiers] and ranks.is_leader:
        _warn_about_later(output_dir, manifest.step)
        if remote_dir is not None:
            # Only here, on one rank: a store that cannot be asked must not leave the others waiting.
            with suppress(StoreError):
                _warn_about_later(remote_dir, manifest.step)
    return path, manifest


def _newest(ranks: RankAgreement, output_dir: Path, remote_dir: Path | None) -> tuple[Path, Manifest] | None:
    found = ranks.run(_PHASE, lambda: _saves(output_dir) if ranks.is_leader else [])
    saves = ranks.run_on_main(_PHASE, lambda: _common(ranks, output_dir, found))
    choices = [(step, output_dir) for step, _ in map(_save, saves)]
    if remote_dir is not None:
        more = ranks.run_on_main(_PHASE, lambda: _remote_saves(remote_dir, output_dir))
        # Stable: of one step the local checkpoint comes first.
        choices = sorted(
            [*choices, *((step, remote_dir) for step, _ in map(_save, more))], key=lambda item: -item[0]
        )
    for step, directory in choices:
        path = checkpoint_path(directory, step)
        manifest = _read_everywhere(ranks, path)
        error = _damage(ranks, path, manifest)
        if error is None:
            if directory is remote_dir and ranks.rank == 0:
                _logger.info("%s is taken: %s does not have it, whole", path, output_dir)
            return path, manifest
        if ranks.is_leader:
            _warn_passing_over(path, error)
    for tier in [output_dir] if remote_dir is None else [output_dir, remote_dir]:
        ranks.run_on_main(_PHASE, lambda tier=tier: _check_no_ruins(tier))  # type: ignore[misc]
    return None


def _remote_saves(remote_dir: Path, output_dir: Path) -> list[_Save]:
    try:
        return _saves(remote_dir)
    except StoreError as error:
        raise StoreError(
            f"{describe_error(error).removesuffix('.')}. Whether it holds a newer checkpoint than "
            f"{output_dir} cannot be told. Leave remote_dir out to resume without it."
        ) from error


def _check_no_ruins(output_dir: Path) -> None:
    """Refuse to begin afresh, silently, where there was something to continue from."""
    ruins = [path for _, path in checkpoint_directories(output_dir) if (path / MANIFEST_NAME).exists()]
    if ruins:
        raise CheckpointError(
            f"{output_dir} holds {len(ruins)} checkpoints, the newest is {ruins[0].name}, and none can be "
            "used. The warnings before this say why. Restore one, or move them away to begin afresh."
        )


def _saves(output_dir: Path) -> list[_Save]:
    return [(each.step, each.save_id) for _, each in _good_checkpoints(output_dir, checksums=False)]


def _save(entry: Sequence[int | str]) -> _Save:
    """What has travelled as JSON, which has no tuples."""
    return int(entry[0]), str(entry[1])


def _common(ranks: RankAgreement, output_dir: Path, found: Sequence[Sequence[_Save]]) -> list[_Save]:
    """Saves that every site has, highest step first."""
    by_site = {site.start: [_save(entry) for entry in found[site.start]] for site in ranks.sites()}
    common = set.intersection(*(set(saves) for saves in by_site.values()))
    if not common and any(by_site.values()):
        listing = "; ".join(f"node of rank {rank}: {_listing(saves)}" for rank, saves in by_site.items())
        raise CheckpointError(
            f"no checkpoint in {output_dir} is committed on every node ({listing}). Copy a checkpoint "
            "directory to the nodes that lack it, or move all away to begin afresh."
        )
    newest = max((saves[0] for saves in by_site.values() if saves), default=None)
    if newest is not None and newest not in common:
        _logger.warning(
            "checkpoint-%d is not committed on every node; going back to an earlier one", newest[0]
        )
    return sorted(common, reverse=True)


def _listing(saves: Sequence[_Save]) -> str:
    return ", ".join(f"step {step} (save {number[:8]})" for step, number in saves) or "none"


def _read_everywhere(ranks: RankAgreement, path: Path) -> Manifest:
    manifests: list[Manifest] = []

    def read() -> str:
        if not ranks.is_leader and not (path / MANIFEST_NAME).is_file():
            raise CheckpointError(
                f"this rank does not see {path}, which rank {ranks.leader} found. Put output_dir on storage "
                "that all ranks share, under the same path, or set save_on_each_node=True."
            )
        manifests.append(read_manifest(path))
        return manifests[0].save_id

    saves = ranks.run(_PHASE, read)
    if len(set(saves)) > 1:
        listing = ", ".join(f"rank {rank} has save {number[:8]}" for rank, number in enumerate(saves))
        raise CheckpointError(
            f"{_PHASE}: {path.name} is not the same save on all nodes ({listing}). Load without naming a "
            "checkpoint, or copy the directory of one node to the others."
        )
    return manifests[0]


def _warn_about_later(output_dir: Path, step: int) -> None:
    later = [path.name for number, path in checkpoint_directories(output_dir) if number > step]
    if later:
        _logger.warning(
            "%s holds later checkpoints (%s), which an automatic resume would choose; move them away to go "
            "on from step %d",
            output_dir,
            ", ".join(later),
            step,
        )


class _Read(TypedDict):
    """What one rank found in its part of the files."""

    shares: dict[str, int]
    """Contribution to the checksum of each file."""
    problem: str | None
    """Why a file cannot be read."""


def _compare(ranks: RankAgreement, directory: Path, manifest: Manifest, reads: Sequence[_Read]) -> None:
    """Raise on every rank, with the file's name, where a checksum differs. Collective."""
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

    ranks.run(_PHASE, compare)


def _damage(ranks: RankAgreement, directory: Path, manifest: Manifest) -> CheckpointError | None:
    """Like :func:`_compare`, with the error as the result. Collective."""
    # Outside: too many open files, say, are not damage, and no reason to go back to an older checkpoint.
    reads = _read_shares(ranks, directory, manifest)
    try:
        _compare(ranks, directory, manifest, reads)
    except CheckpointError as error:
        if ranks.broken:
            raise
        return error
    return None


def _read_shares(ranks: RankAgreement, directory: Path, manifest: Manifest) -> list[_Read]:
    """Read all files, of which each rank of a site reads its share of the bytes once. Collective."""

    def read() -> _Read:
        try:
            return _Read(shares=_shares(ranks, directory, manifest), problem=None)
        except OSError as error:
            if error.errno in _EXHAUSTED or isinstance(error, StoreError):
                raise
            return _Read(shares={}, problem=describe_error(error))

    return ranks.run(_PHASE, read)


def _shares(ranks: RankAgreement, directory: Path, manifest: Manifest) -> dict[str, int]:
    there = file_sizes(directory, list(manifest.files))
    in_store = isinstance(directory, StorePath)
    present = {
        name: record
        for name, record in manifest.files.items()
        if name in there and (in_store or (directory / name).is_file())
    }
    total = sum(record.size for record in present.values())
    place = ranks.rank - ranks.leader
    begin, end = total * place // ranks.site_size, total * (place + 1) // ranks.site_size
    threads = reading_threads(directory, ranks.threads)
    bounds = [begin + (end - begin) * number // threads for number in range(threads + 1)]
    sizes = {name: record.size for name, record in present.items()}
    stripes = [_ranges(sizes, a, b) for a, b in pairwise(bounds)]

    def read(some: Sequence[list[_Range]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, first, last in (entry for stripe in some for entry in stripe):
            share = range_share(directory / name, first, last, sizes[name])
            found[name] = found.get(name, 0) ^ share
        return found

    merged: dict[str, int] = {}
    for part in in_threads(threads, stripes, read):
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
