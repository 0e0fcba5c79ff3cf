"""Context parallelism as a transform: each rank of the dimension `context` computes a part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Self

from dist_env import ParallelLayout
from model_parallel import PlanError, SequencePart, divide_sequences, undivided

from ..arguments import TrainingArguments
from ..errors import ConfigurationError
from .transforms import BuiltModel, ModelTransform, StepHooks


class ContextParallel(ModelTransform):
    """Divides sequences over the ranks of the dimension `context`, which get the same batches.

    Targets are made before sequences are divided, and rows of any length are lengthened by what does not
    count. Weights are sharded over these ranks too, by `trainer_fsdp2.FullyShard`:
    `Trainer(args, parallel=[ContextParallel(), FullyShard()])` with `mesh="shard=2,cp=2"`.

    Args:
        balanced: Whether each rank has a piece from both halves of a sequence, so that all compute equally
            much. If not, each has one piece.
    """

    axis: ClassVar[str] = "context"

    def __init__(self, *, balanced: bool = True) -> None:
        self._balanced = balanced

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Self:
        """The transform of a layout that nothing else is said about."""
        return cls()

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What is whole on each rank."""
        return ("keys and values of a layer are whole on each rank of cp while it computes",)

    def apply(self, built: BuiltModel) -> None:
        """Have the attention of the model work on parts of sequences, in place.

        Raises:
            ConfigurationError: If this model attends in a way that cannot be divided.
        """
        ranks = built.ranks
        if ranks.meshes is None:
            raise ConfigurationError(
                "world_size",
                ranks.env.world_size,
                "has no process group to divide sequences over",
                "open a dist_env.DistributedEnvironment first and pass it as distributed_env",
            )
        try:
            part = divide_sequences(
                built.model, ranks.meshes.context, balanced=self._balanced, multiple=ranks.layout.tensor
            )
        except PlanError as error:
            raise ConfigurationError(
                "mesh", str(ranks.layout), f"cannot be used with this model: {error}", "leave out cp"
            ) from error
        built.sequence = part
        built.hooks.append(ContextHooks(part))


class ContextHooks(StepHooks):
    """What divided sequences add to a run: texts are written with whole ones.

    Args:
        part: How sequences are divided.
    """

    def __init__(self, part: SequencePart) -> None:
        self._part = part

    def generating(self) -> AbstractContextManager[None]:
        """A context in which sequences are whole: the next token is one position."""
        return undivided(self._part)
