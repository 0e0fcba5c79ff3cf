"""Curves of one or several runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .draw import XAxis, draw
from .panels import choose_panels
from .pens import DrawnRun
from .run_log import TOKEN_KEYS, RunLog, default_names, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LogPath: TypeAlias = str | Path

_SUFFIXES = (".png", ".svg")


def plot_logs(
    log_paths: LogPath | Sequence[LogPath],
    output: LogPath,
    *,
    panels: Sequence[str] | None = None,
    x: XAxis = "step",
    smooth: float = 0.0,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw the figures of log files, several runs over one another, and replace `output` by the picture.

    | panel | draws |
    |---|---|
    | `loss` | `loss` as a line, `eval_loss` as points |
    | `tok_per_sec` | `tok_per_sec` |
    | `mfu` | `mfu` in percent, and `hfu` dashed where it differs |
    | `memory` | `peak_mem_allocated` in GiB: the highest rank as a line, the range over ranks as a band |
    | `learning_rate` | `learning_rate` |

    A null leaves a gap. In other panels a list, which has one element per rank, is drawn by its largest. A
    run that went on from a checkpoint may have done steps twice: the later entries count, and those from
    where training came back to are left out.

    Args:
        log_paths: One log or several; see `load_logs`.
        output: The picture; its suffix, .png or .svg, decides the kind.
        panels: Names from the table, from top to bottom. A name may also be a key of the log entries, such
            as "grad_norm", or several that share a panel: "grad_norm+grad_norm_max"; keys that begin with
            "eval_" are drawn as points. By default, the panels of the table that there are numbers for.
        x: What the horizontal axis counts: "step", or "tokens" by `total_tokens` (of Hugging Face's trainer:
            `num_input_tokens_seen`). An entry without a count stands on the line between its neighbours.
        smooth: Share of the past in an exponential moving average over the entries of `loss`, from 0 to below
            1. The values as logged are drawn pale behind it.
        labels: A name for each run; by default taken from the paths.
        title: By default "Training curve", with the run's name when there is one run.

    Returns:
        The path of the picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
        FileNotFoundError: A log file does not exist.
        ValueError: The suffix is another one, a file is not a log, the labels do not match the paths, a panel
            is unknown or has nothing to draw, a log has no tokens for the axis, or `smooth` is out of range.
    """
    output = Path(output)
    _check(output, x, smooth)
    paths = [Path(p) for p in ([log_paths] if isinstance(log_paths, str | Path) else log_paths)]
    runs = [DrawnRun(name, read_run(path)) for path, name in zip(paths, _names(paths, labels), strict=True)]
    logs = [run.log for run in runs]
    chosen = choose_panels(panels, logs)
    if x == "tokens":
        _check_tokens(logs)
    _save(draw(runs, chosen, title=title or _default_title(runs), x=x, smooth=smooth), output)
    return output


def _check(output: Path, x: str, smooth: float) -> None:
    if output.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"output={str(output)!r}: the suffix must be {' or '.join(_SUFFIXES)}")
    if x not in ("step", "tokens"):
        raise ValueError(f"x={x!r}: must be 'step' or 'tokens'")
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth={smooth!r}: must be at least 0, for no smoothing, and below 1")


def _names(paths: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    names = default_names(paths) if labels is None else list(labels)
    if len(names) != len(paths):
        raise ValueError(f"labels has {len(names)} names for {len(paths)} log files; give one for each")
    return names


def _check_tokens(runs: Sequence[RunLog]) -> None:
    for run in runs:
        if not run.has_tokens:
            keys = " or ".join(TOKEN_KEYS)
            raise ValueError(f"x='tokens': no entry of {run.path} has a number under {keys}; use x='step'")


def _default_title(runs: Sequence[DrawnRun]) -> str:
    return f"Training curve: {runs[0].name}" if len(runs) == 1 else "Training curves"


def _save(figure: Figure, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
    try:
        figure.savefig(temporary, facecolor="white")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
