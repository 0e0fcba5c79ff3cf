"""Room for a run in a directory that holds checkpoints it does not continue: they move aside, and stay."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dist_env import get_logger
from perf_metrics import JsonLogger

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .run import Run

logger = get_logger(__name__)

PREVIOUS = "previous-"
"""Folders of an output directory in which an earlier run rests; the rest of the name is the time in UTC."""


def checkpoints_in(output_dir: str | Path, *, above: int = -1) -> list[Path]:
    """Directories with a checkpoint's name, good or bad, whose step is greater than `above`."""
    directory = Path(output_dir)
    found = directory.glob("checkpoint-*") if directory.is_dir() else ()
    steps = {path: path.name.removeprefix("checkpoint-") for path in found if path.is_dir()}
    return sorted(path for path, step in steps.items() if step.isdecimal() and int(step) > above)


def move_aside(output_dir: str | Path, paths: Iterable[Path]) -> Path | None:
    """Move files and folders to a new `previous-<time>/` in an output directory.

    Nothing is deleted, and nothing in such a folder is found by a later resume. Let one process do it.

    Args:
        output_dir: The output directory.
        paths: What to move; what does not exist is left out.

    Returns:
        The folder; None if there was nothing to move.

    Raises:
        ConfigurationError: If something cannot be moved.
    """
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    directory = Path(output_dir).absolute()
    name = PREVIOUS + time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        folder = _make_new(directory, name)
        for path in existing:
            shutil.move(path, folder / path.name)  # the logs may lie on another file system
    except OSError as error:
        raise ConfigurationError(
            "output_dir",
            str(output_dir),
            f"holds an earlier run that cannot be moved aside ({error})",
            "allow this process to rename there, or choose another output_dir",
        ) from error
    names = ", ".join(path.name for path in existing)
    logger.warning("moved aside to %s: %s", folder, names)
    return folder


def make_room(run: Run) -> None:
    """Move aside what a run that begins would replace, or a later start would prefer to it; collective.

    A fresh start (`resume_from_checkpoint=False` with `overwrite_output_dir=True`) leaves all checkpoints and
    the log behind, one from an older checkpoint of its directory those of later steps.

    Raises:
        ConfigurationError: On every rank, if something cannot be moved.
    """
    args, env, loaded = run.args, run.ranks.env, run.loaded
    if args.save_strategy == "no":
        return
    paths: list[Path] = []
    if loaded is not None and loaded.parent.resolve() == Path(args.output_dir).resolve():
        if run.went_back:
            paths = checkpoints_in(args.output_dir, above=run.state.global_step)
    elif starts_over(run):
        logs = [one.filename for one in run.events.callbacks if isinstance(one, JsonLogger)]
        paths = [*checkpoints_in(args.output_dir), *(args.log_path / name for name in logs)]
    if not run.ranks.any([bool(paths)])[0]:
        return
    failure = None
    # Where nodes keep checkpoints of their own, each has a directory of its own.
    if env.rank == 0 or (args.save_on_each_node and env.local_rank == 0):
        try:
            move_aside(args.output_dir, paths)
        except ConfigurationError as error:
            failure = error
    if run.ranks.any([failure is not None])[0]:
        raise failure or ConfigurationError(
            "output_dir", args.output_dir, "cannot be cleared for this run by another rank", "see its error"
        )


def starts_over(run: Run) -> bool:
    """Whether the run begins anew where another one was, and was told to move that aside."""
    args = run.args
    return args.resume_from_checkpoint is False and args.overwrite_output_dir and run.saved_step < 0


def _make_new(directory: Path, name: str) -> Path:
    number = 1
    while True:
        folder = directory / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
