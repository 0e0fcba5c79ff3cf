"""Everything between a user's model and one that can be sharded, compiled and trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dist_env import get_logger

from .activation_checkpointing import checkpoint_activations
from .caches import leave_caches_out
from .construction import ModelSource, construct

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

logger = get_logger(__name__)


def prepare_model(
    source: ModelSource, args: TrainingArguments, device: torch.device, *, weights_follow: bool
) -> nn.Module:
    """Build the model on the device, convert its layers, and exchange the forward of checkpointed blocks.

    Names of parameters stay as they are. Next come sharding, `compile_model` and the optimizer.

    Args:
        source: The model, or what builds it.
        args: construct_model_on, default_dtype, fp8_*, qat_recipe and activation_checkpointing*.
        device: Where the model computes.
        weights_follow: Whether a checkpoint will fill every weight.

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation.
    """
    return convert_model(construct(source, args, device, weights_will_be_loaded=weights_follow), args, device)


def convert_model(
    model: nn.Module, args: TrainingArguments, device: torch.device, *, gathered_in_fp8: bool = False
) -> nn.Module:
    """Convert the layers of a built model, and exchange the forward of checkpointed blocks; in place.

    Args:
        model: The model; its parameters may be on the meta device.
        args: fp8_*, qat_recipe and activation_checkpointing*.
        device: Where the model will compute.
        gathered_in_fp8: Whether the weights of FP8 layers will be sharded, and gathered in float8.

    Returns:
        The model.

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation.
    """
    from ..precision import convert_to_fp8, prepare_qat

    if args.fp8_recipe is not None:
        convert_to_fp8(model, args, device, gathered=gathered_in_fp8)
    if args.qat_recipe is not None:
        prepare_qat(model, args, device)
    blocks = checkpoint_activations(model, args)
    if not blocks:
        leave_caches_out(model)
    if blocks:
        logger.info("activation checkpointing: %d blocks, %s to %s", len(blocks), blocks[0], blocks[-1])
    return model
