"""Several optimizers that work on one model, each on its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigurationError
from .facade import OptimizerFacade


class Multiopt(OptimizerFacade):
    """Several optimizers that step together, such as Muon for matrices and AdamW for the rest.

    Args:
        optimizers: The members, in the order in which they step and in which their groups are counted.
            Learning-rate logs show the first group of the first one.

    Raises:
        ConfigurationError: If there are none, or two of them have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        _check_members(optimizers)
        super().__init__(optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member.

        Args:
            closure: Computes the loss again, with gradients; called once.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether every member heeds `found_inf` and `grad_scale` by itself; asked by torch's GradScaler."""
        return all(getattr(member, "_step_supports_amp_scaling", False) for member in self.optimizers)

    @property
    def found_inf(self) -> Tensor:
        """Set it to a device scalar; 1 makes the step leave everything as it is."""
        return self._shared("found_inf")

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self._share("found_inf", value)

    @found_inf.deleter
    def found_inf(self) -> None:
        self._unshare("found_inf")

    @property
    def grad_scale(self) -> Tensor:
        """Set it to a device scalar by which the step divides the gradients."""
        return self._shared("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Tensor | None) -> None:
        self._share("grad_scale", value)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._unshare("grad_scale")

    def _shared(self, name: str) -> Tensor:
        value: Tensor = getattr(self.optimizers[0], name)  # AttributeError when unset, as torch expects
        return value

    def _share(self, name: str, value: Tensor | None) -> None:
        for member in self.optimizers:
            setattr(member, name, value)

    def _unshare(self, name: str) -> None:
        for member in self.optimizers:
            delattr(member, name)


def _check_members(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ConfigurationError("optimizer_groups", [], "gives no optimizer at all", "give at least one")
    owner: dict[int, str] = {}
    for member in optimizers:
        kind = type(member).__name__
        for parameter in (p for group in member.param_groups for p in group["params"]):
            if id(parameter) in owner:
                raise ConfigurationError(
                    "optimizer_groups",
                    f"{owner[id(parameter)]} and {kind}",
                    f"both work on one parameter of shape {list(parameter.shape)}",
                    "give each parameter to one optimizer",
                )
            owner[id(parameter)] = kind
