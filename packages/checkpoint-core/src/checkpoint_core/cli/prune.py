"""``prune``: delete old checkpoints, after saying which and why."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from checkpoint_core.cli.console import number_text, print_table, size_text
from checkpoint_core.cli.ls_verify import check_directory, describe_leftover, survey, survey_all, total_bytes
from checkpoint_core.config import lower_is_better
from checkpoint_core.directory.commit import find_leftovers, remove_checkpoint
from checkpoint_core.directory.lease import DirectoryLease
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError


@dataclass(frozen=True)
class BestRule:
    """Which checkpoints are the best."""

    metric: str
    """The metric that tells."""
    count: int
    """How many of the best to keep."""
    greater_is_better: bool
    """The direction."""

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self | None:
        """The rule that the command line states.

        Args:
            arguments: The parsed command line.

        Returns:
            The rule, or None without ``--keep-best``.

        Raises:
            CheckpointError: Options that belong together are not all given.
        """
        metric, count, direction = arguments.metric, arguments.keep_best, arguments.greater_is_better
        if count is None and (metric is not None or direction is not None):
            raise CheckpointError(
                "--metric and its direction need --keep-best K, the number of best to keep."
            )
        if count is None:
            return None
        if metric is None:
            raise CheckpointError(
                f"--keep-best {count} needs --metric NAME. `checkpoint-core ls` shows the metrics."
            )
        try:
            lower = lower_is_better(metric, direction)
        except CheckpointError as error:
            raise CheckpointError(
                f"--metric {metric} does not tell by its name which value is better. Add "
                "--greater-is-better or --lower-is-better."
            ) from error
        return cls(metric, count, not lower)

    def value(self, manifest: Manifest) -> float | None:
        """The metric of a checkpoint; None when it has none, or NaN, which is never the best."""
        value = (manifest.metrics or {}).get(self.metric)
        return None if value is None or value != value else value


@dataclass(frozen=True)
class _Candidate:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest


class _Verdicts:
    """Why each checkpoint that stays does. Those without a reason go."""

    def __init__(self) -> None:
        self.reasons: dict[Path, list[str]] = {}
        self._whole: dict[Path, bool] = {}

    def keep(self, path: Path, reason: str) -> None:
        self.reasons.setdefault(path, []).append(reason)

    def is_whole(self, candidate: _Candidate) -> bool:
        """Whether it may take a place among those kept: what is damaged must not push out what is not."""
        path = candidate.path
        if path not in self._whole:
            found = survey(path, checksums=True)
            self._whole[path] = found.good
            if not found.good:
                self.keep(path, found.describe())
        return self._whole[path]


def prune(directory: Path, *, keep: int, best: BestRule | None, all_runs: bool, delete: bool) -> int:
    """Print which checkpoints go and why the others stay; delete them when told to.

    Args:
        directory: The directory that holds the checkpoints.
        keep: How many of the newest stay, at least 1.
        best: Which stay besides, as the best.
        all_runs: Treat checkpoints of all runs alike. Otherwise only those of the newest one's run may go.
        delete: Delete. Otherwise nothing is changed.

    Returns:
        0.

    Raises:
        CheckpointError: A run owns the directory, a save is going on there, or no checkpoint has the metric.
        OSError: A checkpoint cannot be deleted.
    """
    check_directory(directory)
    _refuse_if_live(directory)
    verdicts = _Verdicts()
    candidates: list[_Candidate] = []
    for found in survey_all(directory, checksums=False):
        if found.manifest is None or not found.good:
            verdicts.keep(found.path, found.describe())
        elif found.path.is_symlink() or found.path.name != f"checkpoint-{found.manifest.step}":
            verdicts.keep(found.path, "a link or a copy, which no run made")
        else:
            candidates.append(_Candidate(found.path, found.manifest))
    _choose(candidates, keep, best, all_runs, verdicts)
    doomed = [candidate for candidate in candidates if candidate.path not in verdicts.reasons]
    _print_plan(directory, doomed, verdicts, best)
    if not doomed:
        print("nothing to delete")
        return 0
    what = f"{len(doomed)} checkpoint(s), {size_text(sum(total_bytes(c.path) for c in doomed))}"
    if not delete:
        print(f"dry run: --yes would delete {what}")
        return 0
    # A run that begins meanwhile would resume from what goes, and one under way deletes by itself.
    with DirectoryLease(directory):
        _refuse_if_live(directory)  # Once more: verification may have taken long.
        _delete(doomed)
    print(f"deleted {what}")
    return 0


def _refuse_if_live(directory: Path) -> None:
    for leftover in find_leftovers(directory):
        if not leftover.is_abandoned():
            raise CheckpointError(
                f"{directory} is in use, because checkpoint-{leftover.step} is "
                f"{describe_leftover(leftover)}. Wait until that training has ended. Its own rotation "
                "deletes as well (save_total_limit)."
            )


def _choose(
    candidates: Sequence[_Candidate], keep: int, best: BestRule | None, all_runs: bool, verdicts: _Verdicts
) -> None:
    """Find reasons to keep candidates, which come with the highest step first."""
    newest = next(filter(verdicts.is_whole, candidates), None)
    if newest is None:
        for candidate in candidates:
            verdicts.keep(candidate.path, "no whole checkpoint to keep instead")
        return
    run_id = newest.manifest.run_id
    mine = [c for c in candidates if all_runs or c.manifest.run_id == run_id]
    for number, candidate in enumerate(islice(filter(verdicts.is_whole, mine), keep), 1):
        verdicts.keep(candidate.path, f"newest ({number} of {keep})")
    if best is not None:
        _keep_best(mine, best, verdicts)
    for candidate in candidates:
        if candidate not in mine:
            verdicts.keep(candidate.path, f"of another run ({candidate.manifest.run_id})")


def _keep_best(candidates: Sequence[_Candidate], best: BestRule, verdicts: _Verdicts) -> None:
    valued = [(value, c) for c in candidates if (value := best.value(c.manifest)) is not None]
    if not valued:
        known = sorted({name for c in candidates for name in c.manifest.metrics or {}})
        raise CheckpointError(
            f"no checkpoint has a value for --metric {best.metric}. They have "
            f"{', '.join(known) or 'no metrics'}."
        )
    # Of equal values the earlier checkpoint is the better one.
    valued.sort(key=lambda pair: (-pair[0] if best.greater_is_better else pair[0], pair[1].manifest.step))
    whole = (pair for pair in valued if verdicts.is_whole(pair[1]))
    for number, (value, candidate) in enumerate(islice(whole, best.count), 1):
        note = f"best ({number} of {best.count}, {best.metric} {number_text(value)})"
        verdicts.keep(candidate.path, note)


def _print_plan(
    directory: Path, doomed: Sequence[_Candidate], verdicts: _Verdicts, best: BestRule | None
) -> None:
    rows = {path: ["keep", path.name, "; ".join(reasons)] for path, reasons in verdicts.reasons.items()}
    for candidate in doomed:
        value = best.value(candidate.manifest) if best else None
        note = f"{best.metric} {number_text(value)}" if best and value is not None else ""
        rows[candidate.path] = ["delete", candidate.path.name, note]
    if rows:
        ordered = sorted(rows, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        print_table(("what", "checkpoint", "why"), [rows[path] for path in ordered])
    else:
        print(f"no checkpoints in {directory}")


def _delete(doomed: Sequence[_Candidate]) -> None:
    for candidate in doomed:
        try:
            remove_checkpoint(candidate.path, candidate.manifest.step)
        except FileNotFoundError:
            continue  # Something else has deleted it already.
