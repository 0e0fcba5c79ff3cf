"""Checkpoints in memory, for ranks that the launcher of a job starts again after one was lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from checkpoint_core import CheckpointError, MemoryDirectory

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .arguments import TrainingArguments
    from .run import Run

RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
"""How often a launcher starts the ranks again, as torchrun tells them."""
LAUNCH_VARIABLE = "TRAINER_CORE_LAUNCH"
"""Tells one launch from others of the same process, where TORCHELASTIC_RUN_ID does not."""


def launch_directory(args: TrainingArguments) -> MemoryDirectory:
    """The directory in memory of a run in this launch; its name also tells the launch from all others.

    A process may launch several times, such as the kernel of a notebook.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get(LAUNCH_VARIABLE, "")
    return MemoryDirectory(f"{args.run_path} {run}" if run else args.run_path)


def memory_directory(args: TrainingArguments) -> MemoryDirectory | None:
    """Where a run keeps checkpoints in memory, on this node and in this job; None if it keeps none.

    Raises:
        ConfigurationError: If nothing would start this process again, and so could use them.
    """
    if not args.memory_save_steps:
        return None
    if os.environ.get(RESTARTS_VARIABLE, "0") in ("", "0"):
        raise ConfigurationError(
            "memory_save_steps",
            args.memory_save_steps,
            "keeps checkpoints for ranks that a launcher starts again, and the one of this process does not",
            "start it with `torchrun --max-restarts 3`, or leave memory_save_steps at 0",
        )
    return launch_directory(args)


def has_memory_checkpoint(args: TrainingArguments) -> bool:
    """Whether ranks of this job that were lost have left a checkpoint in the memory of this node."""
    if not args.memory_save_steps or os.environ.get(RESTARTS_VARIABLE, "0") in ("", "0"):
        return False
    # Imported here: it needs torch, which a launcher that sets the variables above starts ranks before.
    from checkpoint_core import find_latest_checkpoint

    directory = memory_directory(args)
    return directory is not None and find_latest_checkpoint(directory.path) is not None


@contextmanager
def kept_in_memory(run: Run) -> Iterator[None]:
    """A context in which a run keeps checkpoints in memory, if it is to; all ranks enter it together.

    They are removed at its end, when the run has what it needs on storage. What an error or an abort ends
    leaves them until the launcher ends, which may start it again.

    Raises:
        ConfigurationError: On every rank, if a node has no file system in memory.
    """
    directory, failure = memory_directory(run.args), None
    if directory is None:
        yield
        return
    owns = run.ranks.env.local_rank == 0
    if owns:
        try:
            directory.open()
        except CheckpointError as error:
            rule, _, fix = str(error).removesuffix(".").partition(". ")
            failure = ConfigurationError("memory_save_steps", run.args.memory_save_steps, rule, fix)
    run.ranks.fail_together(failure, "keep checkpoints in memory")
    yield
    cause = run.events.stop_cause
    if owns and not (cause is not None and cause.aborted):
        directory.remove()
