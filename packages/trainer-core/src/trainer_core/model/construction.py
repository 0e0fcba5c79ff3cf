"""Build the model where and as the arguments say, ready to be sharded, compiled and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from dist_env import get_logger

from ..errors import ConfigurationError
from .activation_checkpointing import RecomputeFn, checkpoint_activations, leave_caches_out
from .deferred import InitialValues, construct_deferred
from .meta_model import SETTING, Ties, build_meta_model, build_without_storage, is_fake, materialise

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

logger = get_logger(__name__)

ModelInit = Callable[[], nn.Module]
"""Builds the model; called once, after seeding."""
ModelSource = nn.Module | ModelInit
"""A model, or what builds it."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def construct(
    source: ModelSource,
    args: TrainingArguments,
    device: torch.device,
    *,
    weights_will_be_loaded: bool,
) -> nn.Module:
    """Build a model, and put it on the device.

    `default` builds it on the host and moves it. `device` builds it on the device at once; on an accelerator
    its fresh weights differ from those of `default`, since the device has a random generator of its own.
    `meta` allocates the parameters on the device and leaves them for a checkpoint to fill; buffers have the
    values of `default`. After loading, call `verify_initialised`.

    Args:
        source: The model, or what builds it.
        args: construct_model_on and default_dtype.
        device: Where the model computes.
        weights_will_be_loaded: Whether a checkpoint will fill the model; without one, `meta` is carried out
            as `default`, with a warning.

    Returns:
        The model on the device, ties kept.

    Raises:
        ConfigurationError: If a model that is built already is to be built in another way, if `source` builds
            something else than a module, or if `meta` cannot know the value of a buffer.
    """
    if isinstance(source, nn.Module):
        _refuse_for_built_model(args)
        return _moved(source, device)
    where = args.construct_model_on
    if where == "meta" and not weights_will_be_loaded:
        logger.warning("construct_model_on='meta' finds no checkpoint: the model is built as with 'default'")
        where = "default"
    with default_dtype(args.default_dtype):
        if where == "meta":
            model = build_without_storage(lambda: _built(source))
            materialise(model, device)
        elif where == "device":
            with torch.device(device):
                model = _built(source)
        else:
            model = _built(source)
    return _moved(model, device)


def construct_without_weights(
    source: ModelSource, args: TrainingArguments, device: torch.device
) -> tuple[nn.Module, InitialValues | None]:
    """Build a model whose parameters have no storage yet, for ranks that each hold a part of it.

    Args:
        source: The model, or what builds it.
        args: construct_model_on and default_dtype.
        device: Where the model computes; with construct_model_on="device" its generator draws the weights.

    Returns:
        The model, and the values that `construct` would have given its parameters, of which there are none in
        `fake_tensors`; None for a model that is built already, which is returned as it is.

    Raises:
        ConfigurationError: If a model that is built already is to be built in another way, or if `source`
            builds something else than a module.
    """
    if isinstance(source, nn.Module):
        _refuse_for_built_model(args)
        return source, None
    where = device if args.construct_model_on == "device" else torch.device("cpu")
    with default_dtype(args.default_dtype), torch.device(where):
        if is_fake():
            return build_meta_model(lambda: _built(source)), InitialValues()
        return construct_deferred(lambda: _built(source))


@contextmanager
def default_dtype(name: str | None) -> Iterator[None]:
    """Make float32, bfloat16 or float16 the dtype of new tensors; None changes nothing.

    Raises:
        ConfigurationError: For another name.
    """
    if name is None:
        yield
        return
    if name not in _DTYPES:
        raise ConfigurationError(
            "default_dtype", name, f"must be one of {', '.join(_DTYPES)}", "choose one of these"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(_DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _built(source: ModelInit) -> nn.Module:
    model = source()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            "model_init", type(model).__name__, "must return a torch.nn.Module", "return the model"
        )
    return model


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    if is_fake():
        # Module.to exchanges the contents of a parameter and its copy, which torch refuses for a fake tensor:
        # its cache of converted tensors holds a weak reference to it.
        materialise(model, device, lambda tensor: tensor.device != device)
        return model
    ties = Ties(model)
    model.to(device)
    ties.restore()
    return model


def _refuse_for_built_model(args: TrainingArguments) -> None:
    for name, unset in ((SETTING, "default"), ("default_dtype", None)):
        value = getattr(args, name)
        if value != unset:
            raise ConfigurationError(
                name,
                value,
                "has no effect on a model that is already built",
                f"pass model_init instead of model, or leave {name} out",
            )


def prepare_model(
    source: ModelSource,
    args: TrainingArguments,
    device: torch.device,
    *,
    weights_follow: bool,
    recompute_fn: RecomputeFn | None = None,
) -> nn.Module:
    """Build the model on the device, convert its layers, and exchange the forward of checkpointed blocks.

    Names of parameters stay as they are. Next come sharding, `compile_model` and the optimizer.

    Args:
        source: The model, or what builds it.
        args: construct_model_on, default_dtype, fp8_*, qat_recipe and activation_checkpointing*.
        device: Where the model computes.
        weights_follow: Whether a checkpoint will fill every weight.
        recompute_fn: Names the modules that are recomputed, with activation_checkpointing="custom".

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation.
    """
    model = construct(source, args, device, weights_will_be_loaded=weights_follow)
    return convert_model(model, args, device, recompute_fn=recompute_fn)


def convert_model(
    model: nn.Module,
    args: TrainingArguments,
    device: torch.device,
    *,
    gathered_in_fp8: bool = False,
    recompute_fn: RecomputeFn | None = None,
) -> nn.Module:
    """Convert the layers of a built model, and exchange the forward of checkpointed blocks; in place.

    Args:
        model: The model; its parameters may be on the meta device.
        args: fp8_*, qat_recipe and activation_checkpointing*.
        device: Where the model will compute.
        gathered_in_fp8: Whether the weights of FP8 layers will be sharded, and gathered in float8.
        recompute_fn: Names the modules that are recomputed, with activation_checkpointing="custom".

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
    blocks = checkpoint_activations(model, args, recompute_fn)
    if not blocks:
        leave_caches_out(model)
    if blocks:
        logger.info("activation checkpointing: %d blocks, %s to %s", len(blocks), blocks[0], blocks[-1])
    return model
