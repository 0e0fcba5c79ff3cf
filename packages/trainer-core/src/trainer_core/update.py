"""One optimizer step: measure the gradient, clip it, apply it; in three kinds."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from .arguments import TrainingArguments
from .distributed.transforms import BuiltModel
from .loss import loss_denominator
from .optimization import (
    NonFiniteGradientError,
    NonFiniteGuard,
    NonFinitePolicy,
    NonFiniteReport,
    OptimizerInBackward,
    own_part,
)
from .precision import LossScaler

_FINITE = NonFiniteReport(bad=False, first_step=-1, skipped=0)


class Update(Protocol):
    """What the loop asks of the optimizer, in this order at every step."""

    def denominator(self, tokens: Tensor) -> Tensor:
        """What a sum of token losses is divided by before the backward pass.

        Args:
            tokens: Positions that count in the whole step, over all ranks: scalar on the device.
        """

    def grad_norm(self) -> Tensor:
        """Clip the gradient; its norm before that: scalar on the device."""

    def step(self) -> bool:
        """Step the optimizer; whether the schedule moves on."""

    def reset(self) -> None:
        """Forget a step that was left in the middle, and what was observed before."""

    def check_nonfinite(self, global_step: int) -> NonFiniteReport:
        """Whether gradients were not finite since the last look; waits for the device."""


class PlainUpdate:
    """Gradients as they are; steps that are not finite are kept off on the device."""

    def __init__(self, args: TrainingArguments, built: BuiltModel, optimizer: Optimizer) -> None:
        self._max_norm = args.max_grad_norm
        self._built = built
        self._guard = _guard(args, built, optimizer)

    def denominator(self, tokens: Tensor) -> Tensor:
        """The tokens; 1 if there are none."""
        return loss_denominator(tokens)

    def grad_norm(self) -> Tensor:
        """Clip the gradient; its norm before that."""
        norm = self._built.clip_grad_norm(self._max_norm)
        self._guard.observe(norm)
        return norm

    def step(self) -> bool:
        """Step the optimizer."""
        self._guard.step()
        return True

    def reset(self) -> None:
        """Forget what was observed before."""
        self._guard.reset()

    def check_nonfinite(self, global_step: int) -> NonFiniteReport:
        """What the guard saw."""
        return self._guard.check(global_step)


class ScaledUpdate:
    """Float16: the loss is scaled up, the gradients down, and a step that overflowed is skipped."""

    def __init__(
        self, args: TrainingArguments, built: BuiltModel, optimizer: Optimizer, scaler: LossScaler
    ) -> None:
        self._max_norm = args.max_grad_norm
        self._policy = args.nonfinite_policy
        self._built = built
        self._optimizer = optimizer
        self._scaler = scaler
        self._one = torch.ones((), device=built.ranks.device)

    def denominator(self, tokens: Tensor) -> Tensor:
        """The tokens, 1 if there are none, over the scale: dividing by it averages and scales at once."""
        return loss_denominator(tokens) / self._scaler.scale(self._one)

    def grad_norm(self) -> Tensor:
        """Unscale and clip the gradient; its norm between the two."""
        self._scaler.unscale_(self._optimizer)
        return self._built.clip_grad_norm(self._max_norm)

    def step(self) -> bool:
        """Step the optimizer, unless a gradient overflowed."""
        made = self._scaler.step(self._optimizer)
        self._scaler.update()
        return made

    def reset(self) -> None:
        """Forget a step that was left in the middle."""
        self._scaler.reset()

    def check_nonfinite(self, global_step: int) -> NonFiniteReport:
        """Overflow is the scaler's business, unless no scale helps any more.

        Raises:
            NonFiniteGradientError: If none helps, and the policy is not to stop.
        """
        if not self._scaler.is_hopeless:
            return _FINITE
        report = NonFiniteReport(True, global_step - self._scaler.skipped_in_a_row + 1, 0)
        if self._policy == "skip":
            raise NonFiniteGradientError(
                f"the {self._scaler.skipped_in_a_row} steps from {report.first_step} on were skipped: the "
                "gradient is not finite at any loss scale; look for too high a learning rate, or bad data"
            )
        return report


class UpdateInBackward:
    """The optimizer has stepped during the backward pass; the norm is known afterwards."""

    def __init__(self, args: TrainingArguments, built: BuiltModel, optimizer: OptimizerInBackward) -> None:
        self._optimizer = optimizer
        self._guard = _guard(args, built, optimizer)

    def denominator(self, tokens: Tensor) -> Tensor:
        """The tokens; 1 if there are none."""
        return loss_denominator(tokens)

    def grad_norm(self) -> Tensor:
        """The norm of the gradients that were applied."""
        norm = self._optimizer.take_norm()
        self._guard.observe(norm)
        return norm

    def step(self) -> bool:
        """Count the step."""
        self._guard.step()
        return True

    def reset(self) -> None:
        """Forget a step that was left in the middle, and what was observed before."""
        self._optimizer.zero_grad()
        self._optimizer.take_norm()
        self._guard.reset()

    def check_nonfinite(self, global_step: int) -> NonFiniteReport:
        """What the guard saw."""
        return self._guard.check(global_step)


def _guard(args: TrainingArguments, built: BuiltModel, optimizer: Optimizer) -> NonFiniteGuard:
    # Where the optimizer works: parameters may rest on the host while the device computes.
    device = own_part(built.parameters[0]).device if built.parameters else built.ranks.device
    return NonFiniteGuard(cast(NonFinitePolicy, args.nonfinite_policy), device, optimizer)


def build_update(
    args: TrainingArguments, built: BuiltModel, optimizer: Optimizer, scaler: LossScaler | None
) -> Update:
    """The kind of step that optimizer and precision ask for."""
    if isinstance(optimizer, OptimizerInBackward):
        return UpdateInBackward(args, built, optimizer)
    if scaler is not None:
        return ScaledUpdate(args, built, optimizer, scaler)
    return PlainUpdate(args, built, optimizer)
