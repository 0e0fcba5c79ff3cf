"""How many ranks share one copy of the model, and how many copies there are."""

from __future__ import annotations

from dataclasses import dataclass

from dist_env import DistributedEnvironmentError
from trainer_core import ConfigurationError

from ..arguments import FSDP2TrainingArguments


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job: `replicas` copies of the model, each spread over `shards` ranks.

    Attributes:
        shards: Ranks that share one copy.
        replicas: Copies.
    """

    shards: int
    replicas: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.shards * self.replicas

    def __str__(self) -> str:
        if self.replicas == 1:
            return f"one copy over {self.shards} GPUs" if self.shards > 1 else "one GPU"
        if self.shards == 1:
            return f"{self.replicas} GPUs, a whole copy on each"
        return f"{self.replicas} copies, each over {self.shards} GPUs"


def mesh_of(args: FSDP2TrainingArguments, world_size: int) -> Mesh:
    """The mesh that the settings make of so many ranks.

    Raises:
        ConfigurationError: If there is no rank, or the copies do not fit the ranks.
    """
    if world_size < 1:
        raise ConfigurationError("world_size", world_size, "must be at least 1", "raise it")
    try:
        layout = args.layout(world_size)
    except DistributedEnvironmentError as error:
        raise ConfigurationError("mesh", args.mesh, str(error), "change mesh") from error
    if layout is None:
        return Mesh(world_size)
    if layout.world_size != layout.data_count:
        raise ConfigurationError(
            "mesh", args.mesh, "has dimensions other than dp and shard", "leave them out"
        )
    return Mesh(layout.shard, layout.replicate)


def shard_rows(rows: int, shards: int, rank: int) -> int:
    """Rows of a parameter that a rank holds: those of `torch.chunk`, whose last ones get fewer or none."""
    most = -(-rows // shards)
    return max(0, min(most, rows - rank * most))
