"""Keep of a model what a rank's stages hold, and let go of the rest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .idle import instead_of


def names_held(model: nn.Module, stages: Iterable[nn.Module]) -> set[str]:
    """Names of the model's parameters that stages have; a tied one under its first name."""
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def release_rest(model: nn.Module, held: set[str], blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Take every parameter that is not held out of a model, in place.

    A block that holds nothing loses its buffers too; it is never called. Outside the blocks the model's
    forward still goes through modules whose results are not used on this rank: something that is not a number
    and takes no memory stands in for their parameters.

    Args:
        model: The model; parameters on the meta device.
        held: Names of the parameters to keep.
        blocks: Those that other stages may have.
        device: Where the model computes.
    """
    kept = {id(parameter) for name, parameter in model.named_parameters() if name in held}
    inside: set[nn.Module] = set()
    for block in blocks:
        inside.update(block.modules())
        if not any(id(parameter) in kept for parameter in block.parameters()):
            for module in block.modules():
                module._buffers.update(dict.fromkeys(module._buffers))
    for module in model.modules():
        gone = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in kept
        ]
        for name in gone:
            if module in inside:
                module._parameters[name] = None
            else:
                _stand_in(module, name, device)


def _stand_in(module: nn.Module, name: str, device: torch.device) -> None:
    parameter = module._parameters.pop(name)
    if parameter is None:
        return
    value = torch.nan if parameter.is_floating_point() else 0
    stand_in = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    module.register_buffer(name, stand_in, persistent=False)
    # A product with it would first lay it out in memory, at full size.
    forward = instead_of(module)
    if forward is not None:
        vars(module)["forward"] = forward
