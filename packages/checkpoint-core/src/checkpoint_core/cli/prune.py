"""``prune``: which checkpoints of a directory may go."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from checkpoint_core.cli.checkpoints import (
    State,
    check_directory,
    describe_leftover,
    number_text,
    print_table,
    survey,
    survey_all,
    total_bytes,
)
from checkpoint_core.config import lower_is_better
from checkpoint_core.directory import find_leftovers, remove_checkpoint
from checkpoint_core.errors import CheckpointError
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import Manifest
from checkpoint_core.store_path import StorePath
from dist_env import size_text


@dataclass(frozen=True)
class BestRule:
    """Which checkpoints are the best."""

    metric: str
    """The metric that tells."""
    count: int
    """How many of the best to keep."""
    greater_is_better: bool
    """The direction."""

    def value(self, manifest: Manifest) -> float | None:
        """The metric of a checkpoint; None when it has none, or NaN, which is never the best."""
        value = (manifest.metrics or {}).get(self.metric)
        return None if value is None or value != value else value


def _best_rule(metric: str | None, count: int | None, greater_is_better: bool | None) -> BestRule | None:
    """The rule that the command line states; None without ``--keep-best``.

    Raises:
        CheckpointError: Options that belong together are not all given.
    """
    if count is None and (metric is not None or greater_is_better is not None):
        raise CheckpointError("--metric and its direction need --keep-best K, the number of best to keep.")
    if count is None:
        return None
    if metric is None:
        raise CheckpointError(
            f"--keep-best {count} needs --metric NAME. `checkpoint-core ls` shows the metrics."
        )
    try:
        return BestRule(metric, count, not lower_is_better(metric, greater_is_better))
    except CheckpointError as error:
        raise CheckpointError(
            f"--metric {metric} does not tell by its name which value is better. Add "
            "--greater-is-better or --lower-is-better."
        ) from error


_Candidate = tuple[Path, Manifest]


class _Verdicts:
    """Why each checkpoint that stays does. Those without a reason go."""

    def __init__(self) -> None:
        self.reasons: dict[Path, list[str]] = {}
        self._whole: dict[Path, bool] = {}

    def keep(self, path: Path, reason: str) -> None:
        self.reasons.setdefault(path, []).append(reason)

    def is_whole(self, candidate: _Candidate) -> bool:
        """Whether it may take a place among those kept: what is damaged must not push out what is not."""
        path, _ = candidate
        if path not in self._whole:
            found = survey(path, checksums=True)
            self._whole[path] = found.good
            if not found.good:
                self.keep(path, found.describe())
        return self._whole[path]


def prune(
    directory: Path,
    *,
    keep: int,
    keep_best: int | None,
    metric: str | None,
    greater_is_better: bool | None,
    all_runs: bool,
    parts: bool,
    yes: bool,
) -> int:
    """Print which checkpoints go and why the others stay; delete them when told to.

    Args:
        directory: The directory that holds the checkpoints.
        keep: How many of the newest stay, at least 1.
        keep_best: How many of the best stay besides.
        metric: What tells which are the best.
        greater_is_better: Its direction; None goes by the name.
        all_runs: Treat checkpoints of all runs alike. Otherwise only those of the newest one's run may go.
        parts: Treat parts, of which other nodes keep the other files, as whole checkpoints. Otherwise they
            stay: which of them the other nodes can still use is not seen here.
        yes: Delete. Otherwise nothing is changed.

    Returns:
        0.

    Raises:
        CheckpointError: A run owns the directory, saves there, no checkpoint has the metric, or options that
            belong together are not all given.
        OSError: A checkpoint cannot be deleted.
    """
    best = _best_rule(metric, keep_best, greater_is_better)
    check_directory(directory)
    _refuse_if_live(directory)
    verdicts = _Verdicts()
    candidates: list[_Candidate] = []
    for found in survey_all(directory, checksums=False):
        if found.manifest is None or not found.good:
            verdicts.keep(found.path, found.describe())
        elif found.path.is_symlink() or found.path.name != f"checkpoint-{found.manifest.step}":
            verdicts.keep(found.path, "a link or a copy, which no run made")
        elif found.state is State.PART and not parts:
            verdicts.keep(found.path, f"{found.describe()}; --parts lets it go, too")
        else:
            candidates.append((found.path, found.manifest))
    _choose(candidates, keep, best, all_runs, verdicts)
    doomed = [candidate for candidate in candidates if candidate[0] not in verdicts.reasons]
    _print_plan(directory, doomed, verdicts, best)
    if not doomed:
        print("nothing to delete")
        return 0
    what = f"{len(doomed)} checkpoint(s), {size_text(sum(total_bytes(path) for path, _ in doomed))}"
    if not yes:
        print(f"dry run: --yes would delete {what}")
        return 0
    # A run that begins meanwhile would resume from what goes, and one under way deletes by itself. A store
    # has no lease: there a checkpoint is gone at once, with its manifest.
    with nullcontext() if isinstance(directory, StorePath) else DirectoryLease(directory):
        _refuse_if_live(directory)  # Once more: verification may have taken long.
        for path, manifest in doomed:
            with suppress(FileNotFoundError):  # Something else has deleted it already.
                remove_checkpoint(path, manifest.step)
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
        for path, _ in candidates:
            verdicts.keep(path, "no whole checkpoint to keep instead")
        return
    run_id = newest[1].run_id
    mine = [each for each in candidates if all_runs or each[1].run_id == run_id]
    for number, (path, _) in enumerate(islice(filter(verdicts.is_whole, mine), keep), 1):
        verdicts.keep(path, f"newest ({number} of {keep})")
    if best is not None:
        _keep_best(mine, best, verdicts)
    for path, manifest in candidates:
        if (path, manifest) not in mine:
            verdicts.keep(path, f"of another run ({manifest.run_id})")


def _keep_best(candidates: Sequence[_Candidate], best: BestRule, verdicts: _Verdicts) -> None:
    valued = [(value, each) for each in candidates if (value := best.value(each[1])) is not None]
    if not valued:
        known = sorted({name for _, manifest in candidates for name in manifest.metrics or {}})
        raise CheckpointError(
            f"no checkpoint has a value for --metric {best.metric}. They have "
            f"{', '.join(known) or 'no metrics'}."
        )
    # Of equal values the earlier checkpoint is the better one.
    valued.sort(key=lambda pair: (-pair[0] if best.greater_is_better else pair[0], pair[1][1].step))
    whole = (pair for pair in valued if verdicts.is_whole(pair[1]))
    for number, (value, (path, _)) in enumerate(islice(whole, best.count), 1):
        verdicts.keep(path, f"best ({number} of {best.count}, {best.metric} {number_text(value)})")


def _print_plan(
    directory: Path, doomed: Sequence[_Candidate], verdicts: _Verdicts, best: BestRule | None
) -> None:
    rows = {path: ["keep", path.name, "; ".join(reasons)] for path, reasons in verdicts.reasons.items()}
    for path, manifest in doomed:
        value = best.value(manifest) if best else None
        note = f"{best.metric} {number_text(value)}" if best and value is not None else ""
        rows[path] = ["delete", path.name, note]
    if rows:
        ordered = sorted(rows, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        print_table(("what", "checkpoint", "why"), [rows[path] for path in ordered])
    else:
        print(f"no checkpoints in {directory}")
