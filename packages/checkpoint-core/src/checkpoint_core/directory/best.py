"""Which checkpoints are the best by a metric.

The ranking is kept nowhere: it is read from the manifests on the disk whenever it is needed. A run that was
restarted therefore has the ranking that it had before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint_core.directory.discovery import checkpoint_directories
from checkpoint_core.directory.rotation import manifest_of_run
from checkpoint_core.errors import CheckpointError

_LOWER_WINS = ("loss", "perplexity")


@dataclass(frozen=True)
class BestCheckpoint:
    """A checkpoint and the value that ranks it."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step at which it was saved."""
    value: float
    """The metric; never NaN."""


def lower_is_better(metric: str, greater_is_better: bool | None) -> bool:
    """Which direction of a metric wins.

    Args:
        metric: Its name.
        greater_is_better: The direction; None goes by the name, in which ``loss`` or ``perplexity`` means
            that the lower value wins.

    Returns:
        True when the lower value wins.

    Raises:
        CheckpointError: ``greater_is_better`` is None and the name tells nothing.
    """
    if greater_is_better is not None:
        return not greater_is_better
    if any(word in metric.lower() for word in _LOWER_WINS):
        return True
    raise CheckpointError(
        f"greater_is_better=None with best_metric={metric!r}: only a name with {' or '.join(_LOWER_WINS)} "
        "tells which value wins (the lower); set greater_is_better to True or False"
    )


def check_best_settings(
    best_metric: str | None, greater_is_better: bool | None, preserve_n_best: int
) -> None:
    """Check the settings of best tracking, each by itself and together.

    Args:
        best_metric: The metric that ranks checkpoints; None for no ranking.
        greater_is_better: Its direction; None goes by the name.
        preserve_n_best: How many of the best to keep.

    Raises:
        CheckpointError: A value is out of range, or two settings do not fit together.
    """
    if best_metric is not None and (not isinstance(best_metric, str) or not best_metric):
        raise CheckpointError(f"best_metric={best_metric!r} must be the name of a metric, or None")
    if greater_is_better is not None and not isinstance(greater_is_better, bool):
        raise CheckpointError(f"greater_is_better={greater_is_better!r} must be True, False or None")
    if not isinstance(preserve_n_best, int) or isinstance(preserve_n_best, bool) or preserve_n_best < 0:
        raise CheckpointError(f"preserve_n_best={preserve_n_best!r} must be an integer of 0 or more")
    if best_metric is not None:
        lower_is_better(best_metric, greater_is_better)
    elif preserve_n_best:
        raise CheckpointError(
            f"preserve_n_best={preserve_n_best} needs a metric to rank by, but best_metric is None; set "
            "best_metric to a name that the metrics of save_checkpoint() hold, such as 'eval_loss'"
        )
    elif greater_is_better is not None:
        raise CheckpointError(
            f"greater_is_better={greater_is_better} has no meaning while best_metric is None; set "
            "best_metric, or leave greater_is_better out"
        )


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
        manifest = manifest_of_run(path, step, run_id)
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
