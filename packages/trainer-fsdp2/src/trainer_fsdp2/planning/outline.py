"""The model of a run without any values: shapes, dtypes, ties and the forward of checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError, ModelInit, prepare_model

from ..arguments import FSDP2TrainingArguments

_WITHOUT_FP8 = {"fp8_recipe": None, "fp8_dim_alignment": 16, "fp8_exclude": (), "fp8_emulate": False}


def outline(model_init: ModelInit, args: FSDP2TrainingArguments) -> nn.Module:
    """Build the model as training would, with every parameter and buffer on the meta device.

    Layers stay ordinary ones with an `fp8_recipe`, which needs the GPU to be there; their weights have the
    same size.

    Args:
        model_init: Builds the model.
        args: default_dtype, qat_recipe and activation_checkpointing*.

    Raises:
        ConfigurationError: If the model cannot be built without values; the message says why.
    """
    plain = replace(
        args,
        construct_model_on="device",
        fsdp2=replace(args.fsdp2, fp8_all_gather=False),
        **(_WITHOUT_FP8 if args.fp8_recipe is not None else {}),  # type: ignore[arg-type]
    )
    try:
        model = prepare_model(model_init, plain, torch.device("meta"), weights_follow=False)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            "model_init",
            getattr(model_init, "__qualname__", type(model_init).__name__),
            f"cannot build the model on the meta device ({reason(error)})",
            "leave out what reads the values of tensors while the model is built",
        ) from error
    return model.train()


def exchange_tensors(model: nn.Module, made_of: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of all parameters and buffers; ties stay.

    Args:
        model: Changed in place.
        made_of: Makes the new tensor; what takes the place of a parameter becomes one.
    """
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # or another tensor could get the id of one that is gone
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(made_of(parameter), parameter.requires_grad)
                    kept.append(parameter)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = made_of(buffer)
                    kept.append(buffer)
                module._buffers[name] = made[id(buffer)]


def reason(error: Exception) -> str:
    """Kind and first line of an error."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
