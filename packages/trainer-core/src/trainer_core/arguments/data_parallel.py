"""Adds how ranks that work on different data share it."""

from __future__ import annotations

from dataclasses import dataclass

from dist_env import DistributedEnvironmentError, ParallelLayout

from .. import rules
from ..errors import ConfigurationError
from .training import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class DataParallelArguments(TrainingArguments):
    """What every trainer with several data-parallel ranks takes: who reads which data."""

    mesh: str | None = None
    """Ranks in each dimension, such as "dp=2,shard=4" or "pp=2,shard=8": dp replicates the weights, shard
    divides them, pp divides the layers into stages; one size may be auto. None: all ranks in the dimension of
    the trainer."""
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
        if self.mesh:
            try:
                ParallelLayout.parse(self.mesh.replace("auto", "1"))
            except DistributedEnvironmentError as error:
                raise ConfigurationError("mesh", self.mesh, str(error), "change mesh") from error

    def layout(self, world_size: int) -> ParallelLayout | None:
        """The sizes of all dimensions; None if the trainer's own dimension has all ranks.

        Args:
            world_size: Number of ranks of the job.

        Raises:
            dist_env.DistributedEnvironmentError: If `mesh` does not fit them.
        """
        return ParallelLayout.parse(self.mesh, world_size) if self.mesh else None

    @property
    def dispatches_evaluation(self) -> bool:
        """Whether rank 0 reads the evaluation data for all."""
        return self.dispatch_batches if self.dispatch_eval_batches is None else self.dispatch_eval_batches
