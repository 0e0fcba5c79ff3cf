"""Shard a model: its units first, then the root with everything that is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainer_core import add_up_gradients

from .arguments import FSDP2Arguments
from .float8 import gather_float8
from .mesh import resharding
from .policy import offload_policy, precision_policy
from .units import Unit


def shard(
    model: nn.Module,
    units: Sequence[Unit],
    mesh: DeviceMesh,
    settings: FSDP2Arguments,
    device: torch.device,
) -> None:
    """Spread a model over the ranks, in place; parameters become DTensors of the same names.

    Gradients are added up over the ranks, not averaged: the loss is divided by the tokens of all ranks.

    Args:
        model: The model; its parameters may be on the meta device.
        units: What is gathered and dropped by itself.
        mesh: One dimension, or (copies, shards) for hybrid sharding.
        settings: How.
        device: Where this rank computes.

    Raises:
        ConfigurationError: If reshard_after_forward is a number that does not fit the ranks.
    """
    options = {
        "mesh": mesh,
        "mp_policy": precision_policy(settings),
        "offload_policy": offload_policy(settings, device),
    }
    reshard = resharding(settings.reshard_after_forward, mesh.shape[-1])
    for _, module in units:
        fully_shard(module, reshard_after_forward=reshard, **options)  # type: ignore[call-overload]
    # The backward pass begins with the root, so its weights stay where they are until then.
    fully_shard(model, reshard_after_forward=False, **options)  # type: ignore[call-overload]
    add_up_gradients(model)
    if settings.fp8_all_gather:
        gather_float8(model, mesh)
    if settings.prefetch_depth is not None:
        _prefetch([cast(FSDPModule, module) for _, module in units], settings.prefetch_depth)


def _prefetch(units: Sequence[FSDPModule], depth: int) -> None:
    """Gather the weights of the next units while one computes, in the forward pass and back again."""
    if len(units) < 2:
        return
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - depth) : index])))
