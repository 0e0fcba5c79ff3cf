"""Adds how ranks that work on different data share it."""

from __future__ import annotations

from dataclasses import dataclass

from .. import rules
from .training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class DataParallelArguments(TrainingArguments):
    """What every trainer with several data-parallel ranks takes: who reads which data."""

    dispatch_batches: bool = True
    """Rank 0 reads and hands each rank other batches; false: every rank reads data of its own."""
    dispatch_eval_batches: bool | None = None
    """The same for evaluation data; none: as dispatch_batches."""
    uneven_batches: str = "pad"
    """When some ranks run out of training data before others: pad (with batches that do not count), stop
    (leave out what the others have left) or error."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        rules.one_of("uneven_batches", self.uneven_batches, ("pad", "stop", "error"))

    @property
    def dispatches_evaluation(self) -> bool:
        """Whether rank 0 reads the evaluation data for all."""
        return self.dispatch_batches if self.dispatch_eval_batches is None else self.dispatch_eval_batches
