"""Allocate what this rank holds of a model, and fill it with what one process would have begun with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from checkpoint_core import local_ranges

from ..errors import ConfigurationError
from .deferred import InitialValues
from .without_values import has_no_values

_PIECE = 2**18
"""Elements that are in float64 at a time."""


@torch.no_grad()
def fill_parameters(
    model: nn.Module,
    values: InitialValues | None,
    device: torch.device,
    *,
    also_in: Iterable[nn.Module] = (),
) -> dict[str, tuple[float, float]]:
    """Give every parameter on the meta device storage for what this rank holds of it, and fill it.

    Each whole value exists for a moment, one at a time, on the device that the model was built for.

    Args:
        model: The model, or the part of it that this rank holds; parameters may be DTensors. Changed in
            place, ties kept.
        values: What the parameters begin with; none to leave them to a checkpoint.
        device: Where the parameters go.
        also_in: Further modules with parameters of the model, which stay those of the model.

    Returns:
        By name, sum and sum of squares of each whole value, to compare between ranks.

    Raises:
        ConfigurationError: If a parameter has no value to begin with, or is a DTensor with a placement that
            does not say what a rank holds, as Partial does not.
    """
    # All shards first: between whole values, which come and go, they would tear the free memory to pieces
    # that no later value fits into, and what the process takes would grow to the size of the model.
    shards = _allocate(model, device, [model, *also_in])
    sums = {}
    for name, shard in shards.items():
        if values is not None and not has_no_values():
            if name not in values:
                raise ConfigurationError(
                    "model_init",
                    name,
                    "was built on the meta device, so that it has no value to begin with",
                    "build it with values, which are not kept, or load them with construct_model_on='meta'",
                )
            whole = values[name]
            sums[name] = _sums(whole)
            copy_own_part(shard, whole)
    return sums


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on the device; one that stands at several places stays one."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


@torch.no_grad()
def copy_own_part(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole value into a parameter.

    Args:
        parameter: A plain tensor, or a DTensor of Shard, _StridedShard and Replicate placements on any mesh.
        whole: The whole value, on any device, in any dtype; it is the same on all ranks.
    """
    if type(parameter) in (Tensor, nn.Parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    if not parameter._local_tensor.numel():
        return
    part = whole
    for dim, ranges in enumerate(local_ranges(parameter)):
        pieces = [part.narrow(dim, indices.start, len(indices)) for indices in ranges]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    parameter._local_tensor.copy_(part)


def _allocate(model: nn.Module, device: torch.device, roots: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    places, shards = _places(roots), {}
    for name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        _check_placements(name, parameter)
        shards[name] = _like(parameter, torch.empty_like(parameter, device=device))
        for module, attribute in places[id(parameter)]:
            setattr(module, attribute, shards[name])
    return shards


def _check_placements(name: str, parameter: Tensor) -> None:
    """Refuse a DTensor of which no part is this rank's, before anything is allocated."""
    if type(parameter) in (Tensor, nn.Parameter):
        return
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise ConfigurationError(
            "parallelism",
            name,
            f"has the placements {parameter.placements}, and of a Partial parameter no rank holds values",
            "shard or replicate this parameter, or build the model with values",
        )


def _sums(whole: Tensor) -> tuple[float, float]:
    """Sum and sum of squares in float64, piece by piece: as a whole that would be twice the value's size."""
    pieces = (piece.double() for piece in torch.split(whole.reshape(-1), _PIECE))
    sums = [torch.stack([piece.sum(), piece.square().sum()]) for piece in pieces]
    total, squares = torch.stack(sums).sum(dim=0).tolist() if whole.numel() else (0.0, 0.0)
    return total, squares


def _places(roots: Iterable[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
