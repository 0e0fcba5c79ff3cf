"""torch's fused AdamW with less work in Python at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

Group = dict[str, Any]
_PLAIN = (Tensor, torch.nn.Parameter)


class FusedAdamW(AdamW):
    """AdamW, fused; the same arithmetic as `torch.optim.AdamW(fused=True)`, to the last bit.

    torch collects parameters, gradients and state anew at every step, and counts the steps of each parameter
    in a tensor of its own. Here the lists are kept, and the step counts are views of one tensor. State,
    `state_dict` and options are torch's, so that the two can take over each other's checkpoints. Whatever
    is out of the ordinary (another set of gradients, options that are tensors, `amsgrad`) goes torch's way.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights, times the learning rate, per step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._batches: list[_Batch] | None = None
        self._collected: list[Group] = []
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch."""
        self._batches = None
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._batches = None  # torch puts new state in place
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with the gradients that are there.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._batches is None:
            self._batches = self._collect()
        gradients = self._usual_gradients(self._batches)
        if gradients is None:
            self._batches = None
            self._step_as_torch_does()
            return loss
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for batch, tensors in zip(self._batches, gradients, strict=True):
            batch.step(tensors, scale, found)
        return loss

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor, group: Group) -> None:
        """Make the step of one parameter alone, for an optimizer that works during backward."""
        state = self.state.get(parameter)
        if not state or not _is_usual(group):
            self._step_alone(parameter, group)
            return
        state["step"].add_(1)
        _fused_step(
            group, [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [state["step"]]
        )

    def _step_as_torch_does(self) -> None:
        # Without torch's wrapper, which would call the hooks of a step a second time.
        step: Any = AdamW.step
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        step(self)

    def _step_alone(self, parameter: Tensor, group: Group) -> None:
        groups = self.param_groups
        self.param_groups = [{**group, "params": [parameter]}]
        try:
            self._step_as_torch_does()
        finally:
            self.param_groups = groups

    def _usual_gradients(self, batches: list[_Batch]) -> list[list[Tensor]] | None:
        """The gradients of each batch; None if anything is not as when the batches were collected."""
        if not batches or not _same(self.param_groups, self._collected):
            return None
        gradients: list[list[Tensor]] = []
        for batch in batches:
            here = batch.gradients()
            if here is None or not batch.is_current(self.state):
                return None
            gradients.append(here)
        return gradients

    def _collect(self) -> list[_Batch]:
        """Batches of all parameters; none if some are not usual, or have no gradient or no state yet."""
        batches: list[_Batch] = []
        self._collected = list(self.param_groups)
        for group in self.param_groups:
            if not _is_usual(group) or not all(self._has_state(p) for p in group["params"]):
                return []
        for group in self.param_groups:
            idle = [p for p in group["params"] if p.grad is None]
            busy = _by_kind(p for p in group["params"] if p.grad is not None)
            batches += [_Batch(group, members, [], self.state) for members in busy]
            if idle:
                batches.append(_Batch(group, [], idle, self.state))
        return batches

    def _has_state(self, parameter: Tensor) -> bool:
        return type(parameter) in _PLAIN and (parameter.grad is None or bool(self.state.get(parameter)))


class _Batch:
    """Parameters of one group, device and dtype, which one call of the kernel steps together."""

    def __init__(self, group: Group, members: list[Tensor], idle: list[Tensor], state: Any) -> None:
        self.group = group
        self.members = members
        self.idle = idle
        self._held = list(group["params"])
        self._states = [state[p] for p in members]
        self._counts: Tensor | None = None
        self._steps: list[Tensor] = []
        if members:
            # One tensor of all counts: adding one to it is one call instead of one per parameter.
            self._counts = torch.stack([held["step"] for held in self._states])
            self._steps = list(self._counts.unbind())
            for held, count in zip(self._states, self._steps, strict=True):
                held["step"] = count

    def gradients(self) -> list[Tensor] | None:
        """The gradients; None if other parameters have one than when this was collected."""
        found = [p.grad for p in self.members]
        if any(g is None for g in found) or any(p.grad is not None for p in self.idle):
            return None
        return cast(list[Tensor], found)

    def is_current(self, state: Any) -> bool:
        """Whether options, parameters and state are still the ones collected."""
        if not _is_usual(self.group) or not _same(self.group["params"], self._held):
            return False
        if not all(map(is_, map(state.get, self.members), self._states)):
            return False
        return all(held.get("step") is count for held, count in zip(self._states, self._steps, strict=True))

    def step(self, gradients: list[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Step all members; as in torch, `found_inf` of 1 leaves everything as it was."""
        if self._counts is None:
            return
        device = self._counts.device
        scale = None if grad_scale is None else grad_scale.to(device, non_blocking=True)
        found = None if found_inf is None else found_inf.to(device, non_blocking=True)
        self._counts.add_(1)
        averages = [held["exp_avg"] for held in self._states]
        squares = [held["exp_avg_sq"] for held in self._states]
        _fused_step(self.group, self.members, gradients, averages, squares, self._steps, scale, found)
        if found is not None:
            self._counts.sub_(found)


def _fused_step(
    group: Group,
    members: list[Tensor],
    gradients: list[Any],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        members,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def _is_usual(group: Group) -> bool:
    return (
        group["fused"] is True
        and group["decoupled_weight_decay"]
        and not (group["amsgrad"] or group["maximize"] or group["capturable"] or group["differentiable"])
        and not any(isinstance(option, Tensor) for option in (group["lr"], *group["betas"]))
    )


def _same(now: Sequence[object], before: Sequence[object]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _by_kind(parameters: Iterator[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(kinds.values())
