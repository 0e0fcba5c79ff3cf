"""One optimizer step: measure the gradient, clip it, apply it unless it is not finite; in three kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dist_env import get_logger

from .arguments import TrainingArguments, rules
from .arguments.base import NONFINITE_POLICIES, NonFinitePolicy
from .distributed.executor import own_part
from .distributed.transforms import BuiltModel
from .loss import loss_denominator
from .model import is_fake
from .optimization import OptimizerFacade, OptimizerInBackward
from .precision import LossScaler

logger = get_logger(__name__)


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
            f"the gradient norm of step {self.first_step} is not finite, and {kept}. Look for a learning "
            "rate that is too high or bad data, or set nonfinite_policy='skip' to leave such steps out."
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
        self._gated = optimizer if _gates_exactly(optimizer) else None
        # In one tensor, for one read: flag of the step, bad steps, steps since the first bad one.
        self._figures = torch.zeros(3, dtype=torch.float32, device=device)
        self._flag, self._bad, self._age = self._figures.unbind()
        if self._gated is None and not self._in_backward:
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
        if self._gated is not None:
            self._gated.found_inf = self._flag
            self._gated.step()
        elif self._in_backward or is_fake() or not self._flag.item():
            self.optimizer.step()  # a dry run has no flag to read

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


class _GatedOptimizer(Protocol):
    found_inf: Tensor

    def step(self) -> object: ...


def _gates_exactly(optimizer: Optimizer) -> TypeGuard[_GatedOptimizer]:
    """Whether a raised `found_inf` leaves everything as it was."""
    if isinstance(optimizer, OptimizerFacade):
        return all(_gates_exactly(member) for member in optimizer.optimizers)
    if isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups):
        return False  # torch 2.13 leaves the momentum uninitialised when its first step is left out
    # Only the fused kernels know the flag, and a group may ask for another one.
    fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


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
                f"the {self._scaler.skipped_in_a_row} steps from {report.first_step} on were skipped, "
                "because the gradient is not finite at any loss scale. Look for too high a learning rate, "
                "or bad data."
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
    policy = rules.one_of("nonfinite_policy", args.nonfinite_policy, NONFINITE_POLICIES)
    # Where the optimizer works: parameters may rest on the host while the device computes.
    device = own_part(built.parameters[0]).device if built.parameters else built.ranks.device
    return NonFiniteGuard(policy, device, optimizer)


def build_update(
    args: TrainingArguments, built: BuiltModel, optimizer: Optimizer, scaler: LossScaler | None
) -> Update:
    """The kind of step that optimizer and precision ask for."""
    if isinstance(optimizer, OptimizerInBackward):
        return UpdateInBackward(args, built, optimizer)
    if scaler is not None:
        return ScaledUpdate(args, built, optimizer, scaler)
    return PlainUpdate(args, built, optimizer)
