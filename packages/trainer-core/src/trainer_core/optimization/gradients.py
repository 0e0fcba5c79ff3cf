"""Clipping as the trainers call it, and what happens to a step whose gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dist_env import get_logger

from ..distributed.clipping import clip_grad_norm_, local_norm, own_part, scale_down
from ..errors import ConfigurationError
from .optimizers import OptimizerFacade, OptimizerInBackward

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
        "parallel",
        f"a gradient of shape {list(gradient.shape)}",
        f"{found}; the norm is added up over ranks for gradients that are all sharded along the last "
        "dimension of one mesh and replicated along the others",
        "use clip_grad_norm_, which adds up what each placement asks for",
    )


logger = get_logger(__name__)

NonFinitePolicy = Literal["stop", "skip", "raise"]


class NonFiniteGradientError(ArithmeticError):
    """The gradient is not finite, and `nonfinite_policy` says to raise."""


@dataclass(frozen=True)
class NonFiniteReport:
    """What the host learned when it looked."""

    bad: bool
    """Whether a step since the last look had a norm that is not finite."""
    first_step: int
    """The first such step, counted as in the log; -1 if there is none."""
    skipped: int
    """Updates left out since the last look, under the policy `skip`."""

    def message(self, updated: bool = False) -> str:
        """What to tell the user of a step that stopped or failed the run."""
        kept = "it was applied" if updated else "neither it nor any later one was applied"
        return (
            f"the gradient norm of step {self.first_step} is not finite, and {kept}; look for a learning "
            "rate that is too high or bad data, or set nonfinite_policy='skip' to leave such steps out"
        )


class NonFiniteGuard:
    """Keeps updates with a gradient that is not finite away from the parameters.

    The norm is global, so every rank comes to the same answer without asking the others. It is judged on
    the device: the optimizer gets a flag (torch's `found_inf`) with which its step leaves parameters,
    moments and step counts as they are, to the last bit. The host learns of it in `check`.

    Under `stop` and `raise` the flag stays up, so that parameters and state stay at the last good step until
    the host looks. Under `skip` it is up for the bad step only. An optimizer that does not know the flag
    costs one read by the host per step. One that works during backward has stepped already; `stop` and
    `raise` find out afterwards.

    Call, per step, `observe` with the norm and then `step` instead of the optimizer's own.

    Args:
        policy: stop, skip or raise.
        device: Where the norm is.
        optimizer: Whose steps to guard.
    """

    def __init__(self, policy: NonFinitePolicy, device: torch.device, optimizer: Optimizer) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.total_skipped = 0
        """Updates left out since this was made, as of the last `check`."""
        self._sticky = policy != "skip"
        self._in_backward = isinstance(optimizer, OptimizerInBackward)
        self._gates = _gates_exactly(optimizer)
        # In one tensor, for one read: flag of the step, bad steps, steps since the first bad one.
        self._figures = torch.zeros(3, dtype=torch.float32, device=device)
        self._flag, self._bad, self._age = self._figures.unbind()
        if not self._gates and not self._in_backward:
            logger.info(
                "%s cannot skip a step on the device: the host waits for the gradient norm at every step, to "
                "see whether it is finite",
                type(optimizer).__name__,
            )

    def reset(self) -> None:
        """Forget what was observed: the state before has been left behind."""
        self._figures.zero_()

    @torch.no_grad()
    def observe(self, norm: Tensor) -> None:
        """Judge a step by its gradient norm; waits for nothing.

        Args:
            norm: The norm over all ranks: scalar on the device.
        """
        norm = norm.to(self._figures.device, torch.float32)
        wrong = norm.mul(0).ne_(0)  # infinity and NaN times 0 are NaN, which differs from 0
        if self._sticky:
            torch.maximum(self._flag, wrong, out=self._flag)
            self._age.add_(self._flag)
        else:
            self._flag.copy_(wrong)
            self._bad.add_(wrong)
            self._age.add_(self._bad.clamp(max=1))

    def step(self) -> None:
        """Step the optimizer, unless the flag is up."""
        if self._gates:
            self.optimizer.found_inf = self._flag  # type: ignore[attr-defined]
            self.optimizer.step()
        elif self._in_backward or not self._flag.item():
            self.optimizer.step()

    def check(self, global_step: int) -> NonFiniteReport:
        """Look at the device, once: at log, evaluation and save, before anything is written.

        Args:
            global_step: The number of the last step observed.

        Returns:
            What happened since the last look. Under `stop` and `raise` the flag stays up.
        """
        _, bad, age = self._figures.tolist()
        first = global_step - int(age) + 1 if age else -1
        if self._sticky:
            return NonFiniteReport(bool(age), first, 0)
        self._bad.zero_()
        self._age.zero_()
        self.total_skipped += int(bad)
        return NonFiniteReport(bool(bad), first, int(bad))


def _gates_exactly(optimizer: Optimizer) -> bool:
    """Whether a raised `found_inf` leaves everything as it was."""
    if isinstance(optimizer, OptimizerFacade):
        return all(_gates_exactly(member) for member in optimizer.optimizers)
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return False  # torch 2.13 leaves the momentum uninitialised when its first step is left out
    # Only the fused kernels know the flag, and a group may ask for another one.
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
