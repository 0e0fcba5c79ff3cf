"""Which checkpoint of an output directory, or of two tiers, is loaded."""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import SharingPattern
from checkpoint_core.directory import (
    STAGING,
    checkpoint_directories,
    checkpoint_path,
    find_leftovers,
    machine_token,
    publish,
    restore_replaced,
)
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import combine, in_threads, parse_json, range_share
from checkpoint_core.manifest import (
    MANIFEST_NAME,
    Manifest,
    parse_manifest,
    read_manifest,
    verify_checkpoint,
    wrong_content,
)
from checkpoint_core.retention import manifests_of_run
from checkpoint_core.store_path import StorePath, file_sizes, locate, reading_threads
from dist_env import StoreError

_logger = logging.getLogger(__name__)
_PHASE = "choosing a checkpoint"
_Save = tuple[int, str]
"""Step and id of a save."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # which says nothing of the files
_Range = tuple[str, int, int]


def find_latest_checkpoint(
    output_dir: str | Path,
    *,
    remote_dir: str | Path | None = None,
    verify_checksums: bool = False,
    one_node: bool = False,
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
        one_node: Whether a checkpoint counts of which ``output_dir`` holds the files of one node, and other
            nodes keep the others.

    Returns:
        The checkpoint's directory, or None when there is none.

    Raises:
        StoreError: The object store cannot be asked, which says nothing of its checkpoints.
    """
    best: tuple[int, Path] | None = None
    for tier in [output_dir] if remote_dir is None else [output_dir, remote_dir]:
        good = _good_checkpoints(locate(tier), checksums=verify_checksums, one_node=one_node)
        found = next(good, None)
        if found is not None and (best is None or found[1].step > best[0]):
            best = found[1].step, found[0]
    return None if best is None else best[1]


def _good_checkpoints(
    output_dir: Path, *, checksums: bool, one_node: bool = False, above: int | None = None
) -> Iterator[tuple[Path, Manifest]]:
    """Committed checkpoints that pass verification, highest step first; the others are named in warnings.

    With ``one_node`` those too whose other files are kept by other nodes; with ``above`` later ones only.
    """
    restore_replaced(output_dir)
    for step, path in checkpoint_directories(output_dir):
        if above is not None and step <= above:
            return
        try:
            manifest = verify_checkpoint(path, checksums=checksums, one_node=one_node)
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


class Chosen(NamedTuple):
    """A checkpoint that is good."""

    path: Path
    """Its directory."""
    manifest: Manifest
    keepers: Mapping[str, int] | None = None
    """Where nodes keep it together: the leader of a node that has it, by file, without what was deleted. None
    where this rank sees all files."""


def select_checkpoint(
    ranks: RankAgreement,
    output_dir: Path,
    path: Path | None,
    remote_dir: Path | None = None,
    *,
    continues: bool = True,
    above: int | None = None,
) -> Chosen | None:
    """Choose a checkpoint and verify it together. Collective.

    Args:
        ranks: The ranks.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest that is good on every node.
        remote_dir: A second tier, in a store; a step that both hold is taken from ``output_dir``.
        continues: Whether the run continues from it; then a warning names later ones beside ``path``.
        above: Step of a good checkpoint in another place; None if there is not any. Only later ones count
            then, and that none of them can be used is not an error.

    Returns:
        The checkpoint, or None when ``path`` is None and there is none.

    Raises:
        CheckpointError: On every rank: the named checkpoint is missing or damaged, or the nodes have no
            checkpoint in common.
    """
    output_dir = output_dir.absolute()
    if len(ranks.nodes()) > 1:
        _finish_publishing(ranks, output_dir)
    if path is None:
        return _newest(ranks, output_dir, remote_dir, above)
    chosen = _named(ranks, path.absolute())
    tiers = [output_dir] if remote_dir is None else [output_dir, remote_dir]
    if continues and ranks.is_leader and chosen.path.parent.resolve() in [tier.resolve() for tier in tiers]:
        _warn_about_later(output_dir, chosen.manifest.step)
        if remote_dir is not None:
            # Only here, on one rank: a store that cannot be asked must not leave the others waiting.
            with suppress(StoreError):
                _warn_about_later(remote_dir, chosen.manifest.step)
    return chosen


def newest_in_memory(ranks: RankAgreement, memory_dir: Path) -> Chosen | None:
    """Choose and verify the newest checkpoint that every node has in its memory. Collective.

    What cannot be used there is named in warnings: another tier has what a run can be continued from.

    Args:
        ranks: The ranks.
        memory_dir: The directory in the memory of this node.

    Raises:
        CheckpointError: On every rank: one of them was lost, or a directory cannot be listed.
    """
    for step, directory, _ in _local_choices(ranks, memory_dir, or_none=True):
        path = checkpoint_path(directory, step)
        chosen = Chosen(path, _read_everywhere(ranks, path))
        lacking = ranks.run(_PHASE, partial(_lacks_ranks, ranks, chosen.manifest))
        problem: object = next((each for each in lacking if each), None) or _damage(ranks, chosen)
        if problem is None:
            return chosen
        if ranks.is_leader:
            _logger.warning("passing over %s, which is in memory: %s", path, problem)
    return None


def _lacks_ranks(ranks: RankAgreement, manifest: Manifest) -> str:
    """What this node lacks of a checkpoint of several nodes, where each has what its ranks alone have."""
    before = manifest.world_size
    needed = set(ranks.node) if before == ranks.world_size else set(range(before))
    for component in manifest.components:
        lost = needed - {part.writer for part in component.parts}
        if component.pattern == SharingPattern.PER_RANK.value and lost:
            return (
                f"it was saved by {before} ranks, {ranks.world_size} continue, and the state of rank "
                f"{min(lost)} ({component.key}) is in the memory of another node."
            )
    return ""


def _finish_publishing(ranks: RankAgreement, output_dir: Path) -> None:
    """Publish on every node what another node has published. Collective.

    The first node publishes when all nodes have all files of the save, and with that it is committed. A node
    that was killed before its own turn catches up here.
    """

    def look() -> tuple[list[_Save], dict[str, _Save]]:
        if not ranks.is_leader:
            return [], {}
        return _saves(output_dir, one_node=ranks.is_spread), _unpublished(output_dir)

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
        # Of another machine is also what was there before this one lost its power. The directory is that of
        # one node, so none of those processes lives on elsewhere.
        if leftover.kind == STAGING and (leftover.machine != machine_token() or leftover.is_abandoned()):
            try:
                manifest = verify_checkpoint(leftover.path, checksums=False, one_node=True)
            except (CheckpointError, OSError):
                continue  # Killed while it was being written.
            found[leftover.path.name] = (manifest.step, manifest.save_id)
    return found


def _named(ranks: RankAgreement, path: Path) -> Chosen:
    keeps_parts = ranks.is_spread and not isinstance(path, StorePath)

    def check() -> list[_Kept]:
        if not (path / MANIFEST_NAME).is_file() and checkpoint_directories(path):
            newest = checkpoint_directories(path)[0][1]
            raise CheckpointError(
                f"{path} contains checkpoints but is not one itself. Pass one of them, such as {newest}."
            )
        if keeps_parts and not (path / MANIFEST_NAME).is_file():
            return []  # Other nodes may have all of it.
        manifest = verify_checkpoint(path, checksums=False, one_node=keeps_parts)
        return [_kept(path, manifest)] if keeps_parts else []

    found = ranks.run(_PHASE, lambda: check() if ranks.is_leader else [])
    if keeps_parts:
        chosen = _together(ranks, path, {rank: kept[0] for rank, kept in enumerate(found) if kept})
    else:
        chosen = Chosen(path, _read_everywhere(ranks, path))
    _compare(ranks, chosen, _read_shares(ranks, chosen))
    return chosen


class _Kept(TypedDict):
    """What one node has of a checkpoint."""

    step: int
    save_id: str
    nodes: int
    """Number of nodes that keep it together."""
    files: list[str]
    """Names of the files that it has."""
    missing: list[str]
    """Names of the others."""


def _kept(path: Path, manifest: Manifest) -> _Kept:
    there = file_sizes(path, list(manifest.files))
    missing = sorted(set(manifest.files) - set(there))
    save = (manifest.step, manifest.save_id, manifest.nodes)
    return _Kept(step=save[0], save_id=save[1], nodes=save[2], files=sorted(there), missing=missing)


def _together(ranks: RankAgreement, path: Path, kept: Mapping[int, _Kept]) -> Chosen:
    """A checkpoint of which each node may keep a part. Collective.

    Args:
        ranks: The ranks.
        path: Its directory, which need not be on every node.
        kept: What nodes have of it, by their leader; equal on all ranks.

    Raises:
        CheckpointError: On every rank: no node has it, the nodes have different saves, or not all of one.
    """
    if not kept:
        raise CheckpointError(f"{_PHASE}: no node has a committed checkpoint at {path}.")
    first = min(kept)
    if other := [rank for rank in kept if kept[rank]["save_id"] != kept[first]["save_id"]]:
        raise CheckpointError(
            f"{_PHASE}: {path.name} is not the same save on all nodes (rank {first} has save "
            f"{kept[first]['save_id'][:8]}, rank {other[0]} has save {kept[other[0]]['save_id'][:8]}). Move "
            "the directory of one of them away."
        )
    keepers: dict[str, int] = {}
    for rank in sorted(kept, reverse=True):
        keepers |= dict.fromkeys(kept[rank]["files"], rank)
    # Where all parts are there, what none has was deleted, as from a checkpoint in one place.
    counts = [len(each["files"]) for each in kept.values()]
    all_parts = len(counts) >= kept[first]["nodes"] and all(counts) and sum(counts) == len(keepers)
    if not all_parts and (lost := [name for name in kept[first]["missing"] if name not in keepers]):
        raise CheckpointError(
            f"{path} is not whole: none of the nodes of this job has {lost[0]}"
            + (f", nor {len(lost) - 1} other files" if len(lost) > 1 else "")
            + ". Start the job on all nodes that saved it, or load another checkpoint."
        )
    text = ranks.run_on_main(_PHASE, lambda: (path / MANIFEST_NAME).read_bytes().decode(), first)
    return Chosen(path, parse_manifest(path / MANIFEST_NAME, parse_json(text.encode())), keepers)


def whole_saves(
    ranks: RankAgreement, output_dir: Path, run_id: str | None = None, above: int | None = None
) -> list[Chosen]:
    """The checkpoints that the nodes of this job have together, highest step first. Collective.

    Args:
        ranks: The ranks.
        output_dir: The directory of this node.
        run_id: The id of the run whose checkpoints count; None for all, those that are not whole being named
            in warnings.
        above: The step above which they count, without ``run_id``.

    Returns:
        The checkpoints. Where nodes have different saves of one step, that of more nodes comes first.
    """

    def look() -> list[_Kept]:
        if not ranks.is_leader:
            return []
        if run_id is not None:
            known = manifests_of_run(output_dir, run_id)
            return [_kept(checkpoint_path(output_dir, step), known[step]) for step in known]
        found = _good_checkpoints(output_dir, checksums=False, one_node=True, above=above)
        return [_kept(path, manifest) for path, manifest in found]

    by_save: dict[_Save, dict[int, _Kept]] = {}
    for rank, some in enumerate(ranks.run(_PHASE, look)):
        for kept in some:
            # A node that was away may hold an older save of the same step.
            by_save.setdefault((kept["step"], kept["save_id"]), {})[rank] = kept
    whole = []
    for save in sorted(by_save, key=lambda save: (-save[0], -len(by_save[save]))):
        path = checkpoint_path(output_dir, save[0])
        try:
            whole.append(_together(ranks, path, by_save[save]))
        except CheckpointError as error:
            if ranks.broken:
                raise
            if ranks.rank == 0 and run_id is None:
                _warn_passing_over(path, error)
    return whole


_Choices = list[tuple[int, Path, Chosen | None]]


def _local_choices(
    ranks: RankAgreement, output_dir: Path, above: int | None = None, *, or_none: bool = False
) -> _Choices:
    """Step, directory and what is known of the checkpoints of all nodes, highest step first. Collective.

    With ``or_none`` it gives none, and a warning, where nodes have none in common. What cannot be asked may
    hold the newest, so that is an error all the same.
    """
    if ranks.is_spread:
        return [
            (each.manifest.step, output_dir, each) for each in whole_saves(ranks, output_dir, above=above)
        ]
    found = ranks.run(_PHASE, lambda: _saves(output_dir, above=above) if ranks.is_leader else [])
    try:
        saves = ranks.run_on_main(_PHASE, lambda: _common(ranks, output_dir, found))
    except CheckpointError as error:
        if ranks.broken or not or_none:
            raise
        if ranks.rank == 0:
            _logger.warning("passing over the checkpoints in %s: %s", output_dir, error)
        return []
    return [(step, output_dir, None) for step, _ in map(_save, saves)]


def _newest(
    ranks: RankAgreement, output_dir: Path, remote_dir: Path | None, above: int | None
) -> Chosen | None:
    choices = _local_choices(ranks, output_dir, above, or_none=above is not None)
    if remote_dir is not None:
        more = ranks.run_on_main(_PHASE, lambda: _remote_saves(remote_dir, output_dir, above))
        # Stable: of one step the local checkpoint comes first.
        choices = sorted(
            [*choices, *((step, remote_dir, None) for step, _ in map(_save, more))],
            key=lambda item: -item[0],
        )
    for step, directory, known in choices:
        path = checkpoint_path(directory, step)
        chosen = known or Chosen(path, _read_everywhere(ranks, path))
        error = _damage(ranks, chosen)
        if error is None:
            if directory is remote_dir and ranks.rank == 0:
                _logger.info("%s is taken: %s does not have it, whole", path, output_dir)
            return chosen
        if ranks.is_leader:
            _warn_passing_over(path, error)
    if above is not None:
        return None
    ranks.run_on_leaders(_PHASE, lambda: _check_no_ruins(output_dir))
    if remote_dir is not None:
        ranks.run_on_main(_PHASE, lambda: _check_no_ruins(remote_dir))
    return None


def _remote_saves(remote_dir: Path, output_dir: Path, above: int | None) -> list[_Save]:
    try:
        return _saves(remote_dir, above=above)
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


def _saves(output_dir: Path, *, one_node: bool = False, above: int | None = None) -> list[_Save]:
    found = _good_checkpoints(output_dir, checksums=False, one_node=one_node, above=above)
    return [(each.step, each.save_id) for _, each in found]


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


def _compare(ranks: RankAgreement, chosen: Chosen, reads: Sequence[_Read]) -> None:
    """Raise on every rank, with the file's name, where a checksum differs. Collective."""
    mine = [reads[rank]["shares"] for rank in ranks.node]

    def compare() -> None:
        if (problem := reads[ranks.rank]["problem"]) is not None:
            raise CheckpointError(problem)
        if not ranks.is_leader or any(reads[rank]["problem"] for rank in ranks.node):  # a share is missing
            return
        for name, record in chosen.manifest.files.items():
            found = [share[name] for share in mine if name in share]
            if found and combine(found) != record.checksum:
                raise wrong_content(chosen.path / name)

    ranks.run(_PHASE, compare)


def _damage(ranks: RankAgreement, chosen: Chosen) -> CheckpointError | None:
    """Like :func:`_compare`, with the error as the result. Collective."""
    # Outside: too many open files, say, are not damage, and no reason to go back to an older checkpoint.
    reads = _read_shares(ranks, chosen)
    try:
        _compare(ranks, chosen, reads)
    except CheckpointError as error:
        if ranks.broken:
            raise
        return error
    return None


def _read_shares(ranks: RankAgreement, chosen: Chosen) -> list[_Read]:
    """Read all files that a node keeps, of which each of its ranks reads its share once. Collective."""

    def read() -> _Read:
        try:
            return _Read(shares=_shares(ranks, chosen), problem=None)
        except OSError as error:
            if error.errno in _EXHAUSTED or isinstance(error, StoreError):
                raise
            return _Read(shares={}, problem=describe_error(error))

    return ranks.run(_PHASE, read)


def _shares(ranks: RankAgreement, chosen: Chosen) -> dict[str, int]:
    directory, manifest, keepers = chosen
    names = [name for name in manifest.files if keepers is None or keepers.get(name) == ranks.leader]
    there = file_sizes(directory, names)
    in_store = isinstance(directory, StorePath)
    present = {
        name: record
        for name, record in manifest.files.items()
        if name in there and (in_store or (directory / name).is_file())
    }
    total = sum(record.size for record in present.values())
    place = ranks.rank - ranks.leader
    begin, end = total * place // len(ranks.node), total * (place + 1) // len(ranks.node)
    threads = reading_threads(directory, ranks.threads)
    bounds = [begin + (end - begin) * number // threads for number in range(threads + 1)]
    sizes = {name: record.size for name, record in present.items()}
    stripes = [_ranges(sizes, a, b) for a, b in pairwise(bounds)]

    def read(some: Sequence[list[_Range]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, first, last in (entry for stripe in some for entry in stripe):
            found[name] = found.get(name, 0) ^ range_share(directory / name, first, last, sizes[name])
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
