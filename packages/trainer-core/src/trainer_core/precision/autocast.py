"""Autocast, the precision of float32 products, and loss scaling for float16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import BaseTrainingArguments

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(args: BaseTrainingArguments, device_type: str) -> AbstractContextManager[object]:
    """The autocast context of a forward pass; nothing without mixed precision.

    Args:
        args: `mixed_precision`: None, "no", "bf16" or "fp16".
        device_type: Where the model computes: "cpu", "cuda", ...
    """
    if args.mixed_precision in (None, "no"):
        return nullcontext()
    return torch.autocast(device_type, dtype=AUTOCAST_DTYPES[args.mixed_precision])


@contextmanager
def matmul_precision(args: BaseTrainingArguments) -> Iterator[None]:
    """Set the precision of float32 products, and set it back afterwards."""
    if args.float32_matmul_precision is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


HOPELESS_SKIPS = 25
"""Skipped steps in a row after which a smaller scale cannot help: from 2**16 the scale is down to 2**-9."""


class SteppedOptimizer(Protocol):
    """What the scaler needs of an optimizer; one that unites several has the groups of all of them."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Apply the gradients."""


class LossScaler:
    """Multiplies the loss before the backward pass, divides the gradients after it, skips what overflowed.

    For each optimizer step: `scale` every microbatch's loss, `unscale_` once before the gradient norm is
    measured, `step`, `update`. One decision is made for all parameters of the optimizer: an overflow anywhere
    skips the step everywhere. To know whether the step was made, the host waits for the device once a step.

    State component `grad_scaler` of a checkpoint.

    Args:
        device_type: Where the gradients are: "cpu", "cuda", ...
        initial_scale: First factor.
        growth_interval: Steps without overflow after which the factor doubles. An overflow halves it.
    """

    def __init__(
        self, device_type: str, *, initial_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self._scaler = torch.amp.GradScaler(
            device_type, init_scale=initial_scale, growth_interval=growth_interval
        )
        self._gate: _Gate | None = None
        self.skipped_in_a_row = 0
        """Steps skipped since the last one that was made."""
        self.skipped_steps = 0
        """Steps skipped in the whole run."""

    @property
    def is_hopeless(self) -> bool:
        """Whether so many steps in a row overflowed that the cause cannot be the scale."""
        return self.skipped_in_a_row >= HOPELESS_SKIPS

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from: `loss` times the factor; scalar, in the loss's dtype."""
        return self._scaler.scale(loss)

    def unscale_(self, optimizer: SteppedOptimizer) -> None:
        """Divide the optimizer's gradients by the factor, in place, once per step.

        Raises:
            RuntimeError: If called twice before `update`, or for another optimizer before `update`.
        """
        if self._gate is not None:
            raise RuntimeError("unscale_ was called before in this step. Unite several optimizers in one.")
        self._gate = _Gate(optimizer)
        self._scaler.unscale_(self._gate.for_scaler())

    def step(self, optimizer: SteppedOptimizer) -> bool:
        """Step the optimizer, unless a gradient is infinite or not a number.

        Args:
            optimizer: The same as given to `unscale_`; its gradients are unscaled first if they were not.

        Returns:
            Whether the step was made. After a skipped one leave the schedule and the statistics of the
            gradient norm as they are.

        Raises:
            RuntimeError: If `unscale_` was called with another optimizer, or `step` twice before `update`.
        """
        if self._gate is None:
            self.unscale_(optimizer)
        gate = self._gate
        if gate is None or gate.optimizer is not optimizer:
            raise RuntimeError("step and unscale_ got different optimizers. Unite several optimizers in one.")
        self._scaler.step(gate.for_scaler())
        self.skipped_in_a_row = 0 if gate.opened else self.skipped_in_a_row + 1
        self.skipped_steps += not gate.opened
        return gate.opened

    def update(self) -> None:
        """Choose the factor of the next step; on the device, without waiting."""
        self._scaler.update()
        self._gate = None

    def reset(self) -> None:
        """Forget a step that an error has cut short; waits for the device."""
        if self._gate is not None:
            self._scaler.update(self._scaler.get_scale())
            self._gate = None

    def get_scale(self) -> float:
        """The factor; waits for the device."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict[str, object]:
        """Factor, its rule, and the skipped steps."""
        counts = {"skipped_in_a_row": self.skipped_in_a_row, "skipped_steps": self.skipped_steps}
        return {**self._scaler.state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put a saved state back.

        Raises:
            KeyError: If an entry is missing.
            TypeError: If a number of skipped steps is something else.
        """
        rest = dict(state)
        self.skipped_in_a_row = _count(rest.pop("skipped_in_a_row"))
        self.skipped_steps = _count(rest.pop("skipped_steps"))
        self._scaler.load_state_dict(rest)


def _count(saved: object) -> int:
    if not isinstance(saved, SupportsInt):
        raise TypeError(
            f"a number of skipped steps is a {type(saved).__name__}. Load the state of a LossScaler."
        )
    return int(saved)


class _Gate:
    """Stands for an optimizer towards torch's scaler and notes whether the step was let through.

    Fused optimizers skip the step on the device without a word; behind the gate they are like any other.
    """

    def __init__(self, optimizer: SteppedOptimizer) -> None:
        self.optimizer = optimizer
        self.opened = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()
        self.opened = True

    def for_scaler(self) -> torch.optim.Optimizer:
        # Of an optimizer, torch's scaler uses groups and step alone.
        return cast(torch.optim.Optimizer, self)


def build_scaler(args: BaseTrainingArguments, model: nn.Module, device: torch.device) -> LossScaler | None:
    """The loss scaler that `mixed_precision` asks for; None unless it is fp16.

    Raises:
        ConfigurationError: If trainable weights are float16 themselves: so would be their gradients, which
            cannot be unscaled without falling out of the range again.
    """
    if args.mixed_precision != "fp16":
        return None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigurationError(
                "mixed_precision",
                "fp16",
                f"needs weights in float32 or bfloat16, but {name} is float16",
                "build the model with default_dtype='float32', and autocast computes in float16",
            )
    return LossScaler(device.type)
