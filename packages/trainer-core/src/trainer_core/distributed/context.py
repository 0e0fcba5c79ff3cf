"""Context parallelism as a transform: each rank of the dimension `context` computes a part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, Self

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
        exchange: "all_gather": each rank has the keys and values of a whole layer while it computes and,
            unless layers are recomputed, until its backward pass. "ring": they travel from rank to rank,
            which takes less memory and more time.
    """

    axis: ClassVar[str] = "context"

    def __init__(
        self, *, balanced: bool = True, exchange: Literal["all_gather", "ring"] = "all_gather"
    ) -> None:
        if exchange not in ("all_gather", "ring"):
            raise ConfigurationError(
                "exchange", exchange, "is not a way to exchange keys and values", "use all_gather or ring"
            )
        self._balanced = balanced
        self._exchange = exchange

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Self:
        """The transform of a layout that nothing else is said about."""
        return cls()

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What is whole on each rank."""
        if self._exchange == "ring":
            return ("keys and values of a layer travel around the ranks of cp",)
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
                built.model,
                ranks.meshes.context,
                balanced=self._balanced,
                multiple=ranks.layout.tensor,
                exchange=self._exchange,
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
