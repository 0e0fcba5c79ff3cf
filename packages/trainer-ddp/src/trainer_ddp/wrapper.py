"""torch's wrapper: made from the settings, and watched for parameters that a step leaves out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from trainer_core import ConfigurationError, is_fake, saved_buffers

from .arguments import DDPArguments


class _Options(TypedDict, total=False):
    init_sync: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    bucket_cap_mb: float
    broadcast_buffers: bool


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
    options: _Options = {
        # To compare shapes torch reads values past the modes that stand in for them.
        "init_sync": settings.init_sync and not is_fake(),
        "find_unused_parameters": settings.find_unused_parameters,
        "gradient_as_bucket_view": settings.gradient_as_bucket_view,
        "static_graph": settings.static_graph,
        "skip_all_reduce_unused_params": settings.skip_all_reduce_unused_params,
    }
    if settings.bucket_cap_mb is not None:
        options["bucket_cap_mb"] = settings.bucket_cap_mb
    if not settings.broadcast_buffers:
        options["broadcast_buffers"] = False
    saved = saved_buffers(model)
    caches = [name for name, _ in model.named_buffers() if name not in saved]
    # Such as rotary tables: each rank makes its own, and torch would send them in every step.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, caches)
    with warnings.catch_warnings():
        # torch 2.13 announces another name, and says to keep this one for buffers that ranks have alone.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device],
            process_group=group,
            **options,
        )


class GradientWatch:
    """Refuses a step whose last backward pass does not reach every trained parameter.

    The wrapper would wait for their gradients, and leave others out of the average without a word.

    Args:
        parameters: The trained parameters by name; none to watch nothing.
        accumulates: Whether a step has several backward passes. A gradient may be there from an earlier one
            then, so arrivals are noted as they come.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]] = (), accumulates: bool = False
    ) -> None:
        self._parameters = list(parameters)
        self._arrived: set[int] | None = set() if accumulates else None
        if self._arrived is not None:
            for _, parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._note)

    def begin(self) -> None:
        """Note that the last backward pass of a step comes next."""
        if self._arrived is not None:
            self._arrived.clear()

    def check(self) -> None:
        """Look whether it reached every parameter.

        Raises:
            ConfigurationError: Naming those that it did not.
        """
        names = [name for name, parameter in self._parameters if not self._has_arrived(parameter)]
        if not names:
            return
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ConfigurationError(
            "ddp.find_unused_parameters",
            False,
            "needs a gradient for every parameter, but the loss of this step's last microbatch does not "
            f"depend on {shown}, and the other ranks wait for the gradients",
            "set it to True, or freeze these parameters with requires_grad_(False) before training begins",
        )

    def _has_arrived(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None if self._arrived is None else id(parameter) in self._arrived

    def _note(self, parameter: Tensor) -> None:
        if self._arrived is not None:
            self._arrived.add(id(parameter))
