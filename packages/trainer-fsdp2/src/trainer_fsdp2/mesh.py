"""The ranks in one dimension, or in two: copies of the model, and ranks that share a copy."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_env import DistributedEnvInterface
from trainer_core import ConfigurationError

COPIES, SHARDS = "replicate", "shard"
"""Names of the dimensions of a mesh for hybrid sharding."""


def check_replicas(replicas: int, world_size: int) -> None:
    """Refuse a number of copies that the ranks cannot hold.

    Raises:
        ConfigurationError: If it does not divide the world size, or leaves nothing to shard.
    """
    if world_size % replicas:
        raise ConfigurationError(
            "fsdp2.replicas",
            replicas,
            f"must divide the world size, {world_size}",
            "each copy of the model is shared by world size / replicas ranks",
        )
    if replicas == world_size > 1:
        raise ConfigurationError(
            "fsdp2.replicas",
            replicas,
            f"leaves nothing to shard on {world_size} ranks",
            "use trainer-ddp, or fewer replicas",
        )


def resharding(setting: bool | int, shards: int) -> bool | int:
    """What `fully_shard` is told of reshard_after_forward: a number must be a true part of the ranks.

    Args:
        setting: fsdp2.reshard_after_forward.
        shards: Ranks that share one copy of the model.

    Raises:
        ConfigurationError: If it does not divide the ranks.
    """
    if isinstance(setting, bool):
        return setting
    if setting == shards:
        return True
    if shards % setting:
        raise ConfigurationError(
            "fsdp2.reshard_after_forward",
            setting,
            f"must divide the {shards} ranks that share one copy of the model",
            f"use one of {', '.join(str(n) for n in range(2, shards) if shards % n == 0) or 'true, false'}",
        )
    return setting


def sharding_mesh(env: DistributedEnvInterface, all_ranks: DeviceMesh | None, replicas: int) -> DeviceMesh:
    """The mesh that the model is sharded on; collective.

    Neighbouring ranks, which usually are on one machine, share a copy.

    Args:
        env: World size and device of this process.
        all_ranks: All ranks in one dimension; none with one rank.
        replicas: Number of copies.

    Raises:
        ConfigurationError: If there is no process group.
    """
    if all_ranks is not None and replicas == 1:
        return all_ranks
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "world_size",
            env.world_size,
            "fsdp2 needs a process group, also of one rank, and there is none",
            "open a dist_env.DistributedEnvironment first and give it as distributed_env",
        )
    shape = (replicas, env.world_size // replicas)
    if replicas == 1:
        return init_device_mesh(env.device_type, (env.world_size,), mesh_dim_names=(SHARDS,))
    return init_device_mesh(env.device_type, shape, mesh_dim_names=(COPIES, SHARDS))
