"""Steps each parameter as soon as its gradient is complete, so that gradients never exist all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .adamw import Group, NamedParameters, OptimizerFactory
from .facade import OptimizerFacade
from .multi import Multiopt

_SETTING = "fuse_optim_with_backward"


class OptimizerInBackward(OptimizerFacade):
    """An optimizer that does its work during the backward pass.

    A hook on each trainable parameter adds the squared norm of its gradient to a sum on the device, steps
    that parameter alone, and frees the gradient. The optimizer behind is an ordinary one over all of them:
    its groups follow a learning-rate schedule, and its state is saved and loaded as if it had never been
    fused, in both directions.

    Several backward passes per step, clipping, loss scaling and skipping a step do not go with it, because
    a gradient is gone before the others are known.

    Args:
        named_parameters: All parameters; frozen ones get no hook. A tied weight comes once.
        factory: Makes the ordinary optimizer, of named parameters. It must treat each parameter by itself
            and keep no counter in its groups.

    Raises:
        ConfigurationError: If the factory makes several optimizers, or nothing is trainable.
    """

    def __init__(self, named_parameters: NamedParameters, factory: OptimizerFactory) -> None:
        named = list({id(p): (name, p) for name, p in named_parameters if p.requires_grad}.values())
        if not named:
            raise ConfigurationError(
                "model", "frozen", "has no trainable parameter", "set requires_grad on some"
            )
        optimizer = factory(named)
        if isinstance(optimizer, Multiopt):
            raise ConfigurationError(
                _SETTING,
                True,
                "works with one optimizer, and optimizer_groups makes several",
                "take the factories out of optimizer_groups",
            )
        super().__init__([optimizer])
        self.steps = 0
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in named}
        self._arrived: set[int] = set()
        self._square = torch.zeros((), device=named[0][1].device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(number))
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Count the step, which the backward pass has made already.

        Raises:
            TypeError: If a closure is given.
        """
        if closure is not None:
            raise TypeError("OptimizerInBackward has stepped during backward; a closure comes too late")
        self._arrived.clear()
        self.steps += 1

    def take_norm(self) -> Tensor:
        """The 2-norm of all gradients since the last call, which begins a new sum.

        Returns:
            float32 scalar on the device; nothing waits for it.
        """
        norm = self._square.sqrt()
        self._square.zero_()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no hook has taken, such as those of a backward pass that failed."""
        self._arrived.clear()
        super().zero_grad(set_to_none)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook_of(self, number: int) -> Callable[[Tensor], None]:
        """The hook of the parameters of one group, which is looked up anew: loading state replaces it."""
        optimizer = self._optimizer

        def hook(parameter: Tensor) -> None:
            self._refuse_second(parameter)
            self._add_norm(parameter)
            self._step_alone(parameter, optimizer.param_groups[number])
            parameter.grad = None

        return hook

    def _refuse_second(self, parameter: Tensor) -> None:
        if id(parameter) in self._arrived:
            raise ConfigurationError(
                _SETTING,
                True,
                f"{self._names[id(parameter)]} got its gradient twice in one step, and the first is used up",
                "run one backward pass per step, and no reentrant activation checkpointing",
            )
        self._arrived.add(id(parameter))

    @torch.no_grad()
    def _add_norm(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            norm = norm.to(self._square.device, non_blocking=True)
            self._square.addcmul_(norm, norm)

    def _step_alone(self, parameter: Tensor, group: Group) -> None:
        """Let the optimizer step as if it had this parameter only."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        alone = {**group, "params": [parameter]}
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        if changed := [name for name in group if name != "params" and alone[name] is not group[name]]:
            raise ConfigurationError(
                _SETTING,
                True,
                f"{type(optimizer).__name__} counts in its groups ({', '.join(changed)}), once per parameter",
                "use an optimizer that keeps its counters per parameter",
            )
