"""Expert parallelism as a transform: each rank of the dimension `expert` holds some experts of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

from dist_env import ParallelLayout
from model_parallel import PlanError

from ..arguments import TrainingArguments
from ..errors import ConfigurationError
from .ranks import Ranks
from .transforms import BuiltModel, ModelTransform, refuse_converted_layers


class ExpertParallel(ModelTransform):
    """Divides the experts of each layer over the ranks of the dimension `expert`; tokens travel to them.

    The dimension borrows its ranks from `shard`, `context` and `tensor`, which divide the rest of the model:
    `Trainer(args, parallel=[ExpertParallel(), FullyShard()])` with `mesh="shard=4,ep=2"`. Ranks that hold the
    same experts share out their weights, by `trainer_fsdp2.FullyShard`. No token is dropped.
    """

    axis: ClassVar[str] = "expert"

    @classmethod
    def from_args(cls, args: TrainingArguments) -> Self:
        """The transform of a layout that nothing else is said about."""
        return cls()

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse settings under which some gradients cannot be handled together with others.

        Raises:
            ConfigurationError: Naming the setting.
        """
        if not self.is_active(ranks.layout):
            return
        refuse_converted_layers(args, ranks.layout, "expert parallelism", "ep")

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What the plan supposes."""
        return ("ranks of ep are supposed to get equally many tokens; what routers send them differs",)

    def apply(self, built: BuiltModel) -> None:
        """Divide the experts in place; their parameters become DTensors of the same names.

        Raises:
            ConfigurationError: If this model has no experts that can be divided among so many ranks.
        """
        from model_parallel import divide_experts  # loads torch's compiler, which takes two seconds

        ranks, meshes = built.ranks, built.ranks.meshes
        if meshes is None or meshes.expert is None:
            raise ConfigurationError(
                "world_size",
                ranks.env.world_size,
                "has no process group to divide experts over",
                "open a dist_env.DistributedEnvironment first and pass it as distributed_env",
            )
        same = meshes.tensor if ranks.layout.tensor > 1 else None
        try:
            names = divide_experts(built.model, meshes.expert, same_tokens=same)
        except PlanError as error:
            raise ConfigurationError(
                "mesh", str(ranks.layout), f"cannot be used with this model: {error}", "correct mesh"
            ) from error
        built.experts = [built.model.get_submodule(name) for name in names]
