"""The order in which a sharded model is built, decided here and nowhere else.

1. construct: parameters without storage, buffers with their values;
2. convert: FP8 or QAT layers, and the forward of checkpointed blocks, so that what a block gathers is
   gathered once and not again when it is recomputed;
3. shard: each unit, then the root;
4. fill: storage for this rank's shards, and the values that one process would have drawn.

Compilation comes after that, in place, and then the optimizer, which sees the shards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dist_env import get_logger
from trainer_core import (
    ModelSource,
    construct_without_weights,
    convert_model,
    fill_parameters,
    move_buffers,
    ordinary_tensors,
)

from .arguments import FSDP2TrainingArguments
from .policy import dtype_table, precision_policy
from .sharding import shard
from .units import refuse_unshardable, units_of

logger = get_logger(__name__)


def build_sharded(
    source: ModelSource,
    args: FSDP2TrainingArguments,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    draw: bool,
    share: Callable[[nn.Module], None],
) -> tuple[nn.Module, dict[str, tuple[float, float]]]:
    """Build the model, of which this rank holds its shards.

    Args:
        source: The model, or what builds it.
        args: How to build, convert and shard it.
        device: Where this rank computes.
        mesh: What to shard it on.
        draw: Whether the weights are to have their initial values; otherwise a checkpoint fills them.
        share: Gives a model that was built already the weights of rank 0.

    Returns:
        The model, and by name sum and sum of squares of each initial value that was computed.

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation.
    """
    rest = torch.device("cpu") if args.fsdp2.cpu_offload else device
    model, values = construct_without_weights(source, args, device)
    if values is None:
        share(model)
    convert_model(model, args, device, gathered_in_fp8=args.fsdp2.fp8_all_gather)
    refuse_unshardable(model)
    units = units_of(model, args)
    with ordinary_tensors():  # in a dry run too: the pieces of hundreds of ranks would take it long
        shard(model, units, mesh, args.fsdp2, device)
    sums = fill_parameters(model, values if draw else None, rest)
    move_buffers(model, device)
    policy = precision_policy(args.fsdp2)
    logger.info(
        "sharded %d units and the root over %s ranks\n%s",
        len(units),
        " x ".join(map(str, mesh.shape)),
        dtype_table(model, policy, args.mixed_precision),
    )
    return model, sums
