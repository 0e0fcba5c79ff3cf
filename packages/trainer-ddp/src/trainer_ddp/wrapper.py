"""torch's wrapper: made from the settings, and watched for parameters that a step leaves out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from trainer_core import ConfigurationError

from .arguments import DDPArguments


def wrap_model(
    model: nn.Module, settings: DDPArguments, group: ProcessGroup, device: torch.device
) -> DistributedDataParallel:
    """Wrap a model whose parameters are on `device`.

    Args:
        model: The model.
        settings: What the wrapper is told.
        group: The ranks.
        device: Where the model is.
    """
    options: dict[str, object] = {
        "init_sync": settings.init_sync,
        "find_unused_parameters": settings.find_unused_parameters,
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "static_graph": settings.static_graph,
        "skip_all_reduce_unused_params": settings.skip_all_reduce_unused_params,
    }
    if settings.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = settings.bucket_cap_mb
    if not settings.broadcast_buffers:
        options["broadcast_buffers"] = False
    with warnings.catch_warnings():
        # torch 2.13 announces another name, and says to keep this one for buffers that ranks have alone.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device],
            process_group=group,
            **options,  # type: ignore[arg-type]
        )


def refuse_missing_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a step whose loss does not depend on every trained parameter.

    The wrapper would wait for their gradients, and leave others out of the average without a word.

    Args:
        parameters: The trained parameters by name, after the backward pass.

    Raises:
        ConfigurationError: Naming the parameters.
    """
    names = [name for name, parameter in parameters if parameter.grad is None]
    if not names:
        return
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise ConfigurationError(
        "ddp.find_unused_parameters",
        False,
        f"the loss of this step does not depend on {shown}, and the other ranks wait for the gradients",
        "set it to true, or freeze these parameters with requires_grad_(False)",
    )
