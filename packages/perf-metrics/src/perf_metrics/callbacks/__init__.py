"""Callbacks that count, show and store what a training run does, and the events that they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class LoggingArguments(Protocol):
    """Arguments of a run, as far as logging needs them; `logging_dir` is read too where there is one."""

    @property
    def output_dir(self) -> str: ...


def run_path(args: LoggingArguments) -> Path:
    """The directory of a run: `output_dir`, or what its trainer says where that is an address of a store."""
    return Path(getattr(args, "run_path", None) or args.output_dir)


class ProgressState(Protocol):
    """Position of a run, as far as the callbacks need it."""

    @property
    def global_step(self) -> int:
        """Updates done since the very beginning."""

    @property
    def max_steps(self) -> int:
        """Updates planned; 0 or less when unknown."""

    @property
    def epoch(self) -> float | None:
        """Passes over the data so far."""

    @property
    def is_world_process_zero(self) -> bool:
        """Whether this process is the one that prints and writes."""


class _Ignored:
    """A handler that does nothing; a trainer that looks at `does_nothing` can save itself the calls."""

    does_nothing = True

    def __call__(self, *arguments: object, **keywords: object) -> None:
        """Do nothing."""


_ignored = _Ignored()


class EventHandlers:
    """Does nothing at every event that `transformers.Trainer` has.

    That trainer calls a method for each of its events, and fails where a callback lacks one. Trainers that
    skip missing methods find these and no more: the events that only they have, such as `on_log_step` and
    `on_train_metrics`, are not among them, so nothing is computed for a callback that does not use it. The
    handlers that do nothing say so by an attribute `does_nothing`, which is True.
    """

    on_init_end: Callable[..., None] = _ignored
    on_train_begin: Callable[..., None] = _ignored
    on_train_end: Callable[..., None] = _ignored
    on_epoch_begin: Callable[..., None] = _ignored
    on_epoch_end: Callable[..., None] = _ignored
    on_step_begin: Callable[..., None] = _ignored
    on_substep_end: Callable[..., None] = _ignored
    on_pre_optimizer_step: Callable[..., None] = _ignored
    on_optimizer_step: Callable[..., None] = _ignored
    on_step_end: Callable[..., None] = _ignored
    on_log: Callable[..., None] = _ignored
    on_prediction_step: Callable[..., None] = _ignored
    on_evaluate: Callable[..., None] = _ignored
    on_predict: Callable[..., None] = _ignored
    on_save: Callable[..., None] = _ignored
    on_memory_save: Callable[..., None] = _ignored
    on_push_begin: Callable[..., None] = _ignored
