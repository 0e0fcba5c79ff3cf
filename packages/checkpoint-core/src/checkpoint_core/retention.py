"""Which checkpoints of a run are the best, and which stay.

The ranking is kept nowhere: it is read from the manifests on the disk whenever it is needed, so that a run
that was restarted has the ranking that it had before.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint_core.config import CheckpointConfig, lower_is_better
from checkpoint_core.directory import checkpoint_directories, checkpoint_path, remove_checkpoint
from checkpoint_core.errors import CheckpointError
from checkpoint_core.manifest import Manifest, verify_checkpoint
from checkpoint_core.store_path import locate

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint and the value that ranks it."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step at which it was saved."""
    value: float
    """The metric; never NaN."""

    @classmethod
    def of(cls, output_dir: Path, manifests: Mapping[int, Manifest], metric: str) -> "list[BestCheckpoint]":
        """Those of some checkpoints that can be ranked.

        Args:
            output_dir: Their directory.
            manifests: What they hold, by step.
            metric: What ranks them.

        Returns:
            Those with the metric, unless it is NaN.
        """
        found = []
        for step, manifest in manifests.items():
            if manifest.metrics is None or metric not in manifest.metrics:
                continue
            value = _as_float(manifest.metrics[metric])
            if not math.isnan(value):
                found.append(cls(checkpoint_path(output_dir, step), step, value))
        return found


def rank_by_metric(found: Iterable[BestCheckpoint], lower_wins: bool) -> list[BestCheckpoint]:
    """Checkpoints, best first; of equal values the earlier step comes first."""
    sign = 1.0 if lower_wins else -1.0
    return sorted(found, key=lambda best: (sign * best.value, best.step))


def manifests_of_run(output_dir: Path, run_id: str, *, parts: bool = True) -> dict[int, Manifest]:
    """The committed checkpoints of a run that are whole, by step.

    Args:
        output_dir: The directory of the checkpoints.
        run_id: The id of the run.
        parts: Whether those count of which other nodes keep files.

    Returns:
        Their manifests. A checkpoint under another name than the run gave is left out.

    Raises:
        OSError: The storage failed, so that nothing can be told.
    """
    found = {}
    for step, path in checkpoint_directories(output_dir):
        manifest = _manifest_of_run(path, step, run_id, parts=parts)
        if manifest is not None:
            found[step] = manifest
    return found


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
    lower_wins = lower_is_better(metric, greater_is_better)
    found = BestCheckpoint.of(output_dir, manifests_of_run(output_dir, run_id), metric)
    return rank_by_metric(found, lower_wins)[:count]


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

    def best(self, count: int | None) -> list[BestCheckpoint]:
        """The best checkpoints, best first.

        Args:
            count: How many at most; None for all.

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

    def rank(self, known: Mapping[int, Manifest]) -> list[BestCheckpoint]:
        """Some checkpoints of the directory, best first.

        Args:
            known: What they hold, by step.

        Returns:
            Those that can be ranked; none without ``best_metric``.
        """
        config = self._config
        if config.best_metric is None:
            return []
        found = BestCheckpoint.of(locate(config.output_dir), known, config.best_metric)
        return rank_by_metric(found, lower_is_better(config.best_metric, config.greater_is_better))

    def apply(self, newest: Path, metrics: Mapping[str, float] | None, in_use: Collection[Path] = ()) -> None:
        """Delete what the limit no longer covers.

        Args:
            newest: The checkpoint just written.
            metrics: Its metrics.
            in_use: Checkpoints to keep this time.
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
        protected += in_use
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
            # The new checkpoint is safe, so training continues.
            _logger.warning("cannot delete the old checkpoint %s (%s)", path, error)
            continue
        _logger.info("deleted %s: save_total_limit is %d", path, limit)
        removed.append(path)
    return removed


def _manifest_of_run(path: Path, step: int, run_id: str, *, parts: bool = True) -> Manifest | None:
    """The manifest of a checkpoint, if it is whole and this run wrote it under this name; None if it is not.

    With ``parts``, whole is also what lacks files that other nodes keep.

    Raises:
        OSError: The storage failed, so that nothing can be told.
    """
    if path.name != f"checkpoint-{step}":
        return None  # "checkpoint-007" is somebody's copy.
    try:
        manifest = verify_checkpoint(path, checksums=False, one_node=parts)
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
