"""What the callbacks read of a trainer's arguments and state: a few attributes, whoever the trainer is."""

from __future__ import annotations

from typing import Protocol


class LoggingArguments(Protocol):
    """Arguments of a run, as far as logging needs them."""

    @property
    def logging_dir(self) -> str | None:
        """Directory for log files; None means the one below."""

    @property
    def output_dir(self) -> str:
        """Directory of the run."""


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
