"""Which checkpoints of an output directory are loaded, which are the best, and which stay.

The ranking is kept nowhere: it is read from the manifests on the disk whenever it is needed, so that a run
that was restarted has the ranking that it had before.
"""

import errno
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.config import CheckpointConfig, lower_is_better
from checkpoint_core.directory import (
    STAGING,
    checkpoint_directories,
    checkpoint_path,
    find_leftovers,
    publish,
    remove_checkpoint,
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


def find_latest_checkpoint(output_dir: str | Path, *, verify_checksums: bool = False) -> Path | None:
    """The committed checkpoint with the highest step.

    Each torn or damaged checkpoint that is passed over is named in a warning. A component file that the user
    deleted does not disqualify a checkpoint.

    Args:
        output_dir: The directory that holds ``checkpoint-<step>`` directories, or its address in a store.
        verify_checksums: Read every file and compare its digest. Without it sizes are compared, which finds
            truncated files at the cost of a directory listing.

    Returns:
        The checkpoint's directory, or None when there is none.

    Raises:
        StoreError: The object store cannot be asked, which says nothing of its checkpoints.
    """
    found = next(_good_checkpoints(locate(output_dir), checksums=verify_checksums), None)
    return None if found is None else found[0]


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
    ranks: RankAgreement, output_dir: Path, path: Path | None
) -> tuple[Path, Manifest] | None:
    """Choose a checkpoint and verify it together. Collective.

    Args:
        ranks: The ranks.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest that is good on every node.

    Returns:
        Directory and manifest, or None when ``path`` is None and there is no checkpoint.

    Raises:
        CheckpointError: On every rank: the named checkpoint is missing or damaged, or the nodes have no
            checkpoint in common.
    """
    output_dir = output_dir.absolute()
    if len(ranks.sites()) > 1:
        _finish_publishing(ranks, output_dir)
    return _newest(ranks, output_dir) if path is None else _named(ranks, output_dir, path.absolute())


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


def _named(ranks: RankAgreement, output_dir: Path, path: Path) -> tuple[Path, Manifest]:
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
    if path.parent.resolve() == output_dir.resolve() and ranks.is_leader:
        _warn_about_later(output_dir, manifest.step)
    return path, manifest


def _newest(ranks: RankAgreement, output_dir: Path) -> tuple[Path, Manifest] | None:
    found = ranks.run(_PHASE, lambda: _saves(output_dir) if ranks.is_leader else [])
    for step, _ in map(_save, ranks.run_on_main(_PHASE, lambda: _common(ranks, output_dir, found))):
        path = checkpoint_path(output_dir, step)
        manifest = _read_everywhere(ranks, path)
        error = _damage(ranks, path, manifest)
        if error is None:
            return path, manifest
        if ranks.is_leader:
            _warn_passing_over(path, error)
    ranks.run_on_main(_PHASE, lambda: _check_no_ruins(output_dir))
    return None


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


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint and the value that ranks it."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step at which it was saved."""
    value: float
    """The metric; never NaN."""


def best_checkpoints(
    output_dir: Path, *, run_id: str, metric: str, greater_is_better: bool | None, count: int | None = None
) -> list[BestCheckpoint]:
    """The committed checkpoints of a run, best first.

    Damaged checkpoints, those saved without the metric and those where it is NaN are left out. Infinities are
    ranked. Of equal values the earlier step comes first.

    Args:
        output_dir: The directory of the checkpoints.
        run_id: The id of the run.
        metric: The metric that ranks them.
        greater_is_better: As for :func:`lower_is_better`.
        count: How many at most; None for all.

    Returns:
        The ranking.

    Raises:
        CheckpointError: ``greater_is_better`` is None and the name tells nothing.
        OSError: The storage failed; a ranking without what could not be read would be wrong.
    """
    sign = 1.0 if lower_is_better(metric, greater_is_better) else -1.0
    found = []
    for step, path in checkpoint_directories(output_dir):
        manifest = _manifest_of_run(path, step, run_id)
        if manifest is None or manifest.metrics is None or metric not in manifest.metrics:
            continue
        value = _as_float(manifest.metrics[metric])
        if not math.isnan(value):
            found.append(BestCheckpoint(path, step, value))
    return sorted(found, key=lambda best: (sign * best.value, best.step))[:count]


def best_summary(
    bests: Sequence[BestCheckpoint], metric: str | None, greater_is_better: bool | None = None
) -> str:
    """The ranking as a table for the end of a run.

    Args:
        bests: The ranking, best first.
        metric: The metric that ranks them; None when no ranking was asked for.
        greater_is_better: As for :func:`lower_is_better`.

    Returns:
        Lines of text without a newline at the end; one line when there is nothing to rank.

    Raises:
        CheckpointError: ``greater_is_better`` is None and the name tells nothing.
    """
    if metric is None:
        return "No best checkpoint: best_metric is not set."
    if not bests:
        return f"No best checkpoint: none of this run holds a value of {metric} that is a number."
    direction = "lower" if lower_is_better(metric, greater_is_better) else "greater"
    rows = [("rank", "step", metric, "checkpoint")]
    for rank, best in enumerate(bests, start=1):
        rows.append((str(rank), str(best.step), f"{best.value:.6g}", str(best.path)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"Best checkpoints by {metric} ({direction} is better):"]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]))
    return "\n".join(lines)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # An integer beyond the floats ranks as their end.
        return math.inf if value > 0 else -math.inf


class Retention:
    """Ranks the checkpoints of one run and deletes those beyond the limit.

    Used by one rank of each directory. Nothing is kept in memory: the ranking is read from the manifests, so
    that a restart loses none of it.

    Args:
        config: Limit and metric.
        run_id: The id of the run.
    """

    def __init__(self, config: CheckpointConfig, run_id: str) -> None:
        self.run_id = run_id
        self.resumed_from: Path | None = None
        self._config = config
        self._warned = False

    def best(self, count: int) -> list[BestCheckpoint]:
        """The best checkpoints, best first.

        Args:
            count: How many at most.

        Returns:
            The checkpoints; none without ``best_metric``.
        """
        config = self._config
        if config.best_metric is None or count == 0:
            return []
        return best_checkpoints(
            locate(config.output_dir),
            run_id=self.run_id,
            metric=config.best_metric,
            greater_is_better=config.greater_is_better,
            count=count,
        )

    def apply(self, newest: Path, metrics: Mapping[str, float] | None) -> None:
        """Delete what the limit no longer covers.

        Args:
            newest: The checkpoint just written.
            metrics: Its metrics.
        """
        self._warn_if_unranked(newest, metrics)
        try:
            protected = [best.path for best in self.best(self._config.preserve_n_best)]
        except OSError as error:
            # Without the ranking the best could be deleted; the new checkpoint is safe, so training
            # continues.
            _logger.warning("nothing is rotated after %s, the best cannot be told (%s)", newest.name, error)
            return
        if self.resumed_from is not None:
            protected.append(self.resumed_from)
        limit, directory = self._config.save_total_limit, locate(self._config.output_dir)
        rotate(directory, limit=limit, run_id=self.run_id, newest=newest, protected=protected)

    def _warn_if_unranked(self, newest: Path, metrics: Mapping[str, float] | None) -> None:
        wanted = self._config.best_metric
        if wanted is None or metrics is None or wanted in metrics or self._warned:
            return
        self._warned = True
        _logger.warning(
            "best_metric=%r is not among the metrics of %s, which are: %s; it is not ranked. Set best_metric "
            "to one of them",
            wanted,
            newest.name,
            ", ".join(sorted(metrics)) or "none",
        )


def rotate(
    output_dir: Path, *, limit: int | None, run_id: str, newest: Path, protected: Collection[Path] = ()
) -> list[Path]:
    """Delete checkpoints of this run beyond the limit, those with the lowest steps first.

    Never deleted are the checkpoint just written, protected checkpoints, directories without a valid
    manifest, damaged checkpoints, checkpoints of other runs, and copies or links under other names than the
    run gave. Of these only the checkpoint just written counts against the limit, unless it is protected too.

    Args:
        output_dir: The directory of the checkpoints.
        limit: How many to keep beside the protected ones, at least 1; None keeps all.
        run_id: The id of this run.
        newest: The checkpoint just written.
        protected: Checkpoints to keep whatever the limit, such as the best ones and the one resumed from.

    Returns:
        The paths that were deleted.
    """
    if limit is None:
        return []
    # Resolved, because the same checkpoint may be named relative to the working directory or through a link.
    exempt = {path.resolve() for path in protected}
    room = limit if newest.resolve() in exempt else limit - 1
    others = _deletable(output_dir, run_id, exempt | {newest.resolve()})
    # Steps beyond the newest are of a branch that this run went back from: they go before its own.
    reached = int(newest.name.removeprefix("checkpoint-"))
    others.sort(key=lambda item: (item[0] > reached, -item[0]))
    removed = []
    for step, path in others[room:]:
        try:
            remove_checkpoint(path, step)
        except OSError as error:
            # The new checkpoint is safe, so this is no reason to stop the training.
            _logger.warning("cannot delete the old checkpoint %s (%s)", path, error)
            continue
        _logger.info("deleted %s: save_total_limit is %d", path, limit)
        removed.append(path)
    return removed


def _manifest_of_run(path: Path, step: int, run_id: str) -> Manifest | None:
    """The manifest of a checkpoint, if it is whole and this run wrote it under this name; None if it is not.

    Raises:
        OSError: The storage failed, so that nothing can be told.
    """
    if path.name != f"checkpoint-{step}":
        return None  # "checkpoint-007" is somebody's copy.
    try:
        manifest = verify_checkpoint(path, checksums=False)
    except (CheckpointError, FileNotFoundError, PermissionError):
        return None
    return manifest if (manifest.run_id, manifest.step) == (run_id, step) else None


def _deletable(output_dir: Path, run_id: str, kept: Collection[Path]) -> list[tuple[int, Path]]:
    found = []
    for step, path in checkpoint_directories(output_dir):
        try:
            known = not path.is_symlink() and _manifest_of_run(path, step, run_id) is not None
        except OSError:
            continue  # What cannot be read is not deleted.
        if known and path.resolve() not in kept:
            found.append((step, path))
    return found
