"""Clipping as the trainers call it, for gradients that all lie on the ranks in one and the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributed.clipping import clip_grad_norm_, local_norm, own_part, scale_down
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

SumOfSquares = Callable[[Tensor], Tensor]
"""Adds up over the ranks what each has of the square of a norm: scalar to scalar."""


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    foreach: bool | None = None,
    *,
    over_ranks: SumOfSquares | None = None,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """Measure the gradient's 2-norm, and scale the gradient down to `max_norm` if it is longer.

    The norm is the root of the sum of squares over all gradients. Those of 16 bits are summed up in float32.
    Nothing waits for the device: the scaling factor is a tensor, 1 if there is nothing to clip.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: The longest allowed; None or 0: measure only.
        foreach: Whether to go through the gradients in one call of torch; one by one if False. None: one
            call, which is the faster one on every device, for few gradients and for many.
        over_ranks: Given where each rank has a part of every gradient (DTensors): adds up what the parts
            give. Each rank works on its own part then, without torch's bookkeeping of DTensors, which costs
            more than the arithmetic. DTensors are sharded along the last dimension of one mesh, and
            replicated along the others, for which `over_ranks` accounts.
        uncounted: With over_ranks: parameters that are clipped as well, and that another rank counts.

    Returns:
        The norm before clipping: scalar on the parameters' device; 0 without gradients.

    Raises:
        ConfigurationError: With over_ranks, if gradients are laid out in another way, so that some would be
            counted several times.
    """
    everything = list(parameters)
    if over_ranks is None:
        return clip_grad_norm_(everything, max_norm, foreach=foreach)
    gradients = [p.grad for p in everything if p.grad is not None]
    _check_layout(gradients)
    parts = [part for gradient in gradients if (part := own_part(gradient)).numel()]
    device = own_part(everything[0]).device if everything else None
    own = local_norm(parts, foreach) if parts else torch.zeros((), device=device)
    norm = over_ranks(own.double().square()).sqrt().to(own.dtype)
    parts += [own_part(p.grad) for p in uncounted if p.grad is not None]
    scale_down(parts, max_norm, norm, foreach)
    return norm


def _check_layout(gradients: list[Tensor]) -> None:
    """Refuse gradients of which the ranks do not all have parts in one and the same way."""
    first: object = None
    for gradient in gradients:
        mesh, placements = _layout(gradient)
        first = first or (mesh,)
        if (mesh,) != first:
            raise _unsupported(gradient, "is on another mesh than others, or on none")
        if placements and not (
            placements[-1].is_shard() and all(placement.is_replicate() for placement in placements[:-1])
        ):
            raise _unsupported(gradient, f"has the placements {placements}")


def _layout(gradient: Tensor) -> tuple[object, tuple[Placement, ...]]:
    from torch.distributed.tensor import DTensor

    if not isinstance(gradient, DTensor):
        return None, ()
    return gradient.device_mesh, gradient.placements


def _unsupported(gradient: Tensor, found: str) -> ConfigurationError:
    return ConfigurationError(
        "parallelism",
        f"a gradient of shape {list(gradient.shape)}",
        f"{found}; the norm is added up over ranks for gradients that are all sharded along the last "
        "dimension of one mesh and replicated along the others",
        "override clip_grad_norm in the Parallelism",
    )
