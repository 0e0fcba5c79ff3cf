"""Parameters that no rank has used in a step: the optimizer leaves them alone, as in one process.

A rank that has not used a parameter takes part in the sum of its gradient with zeros, for others may have
used it. Where none has, the sum is a gradient of zeros, with which the optimizer would decay the weight and
move its moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer_core import is_fake

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


class UnusedParameters:
    """Drops the gradients of parameters that no rank has used since the last time.

    Args:
        units: What is gathered by itself.
        among: Groups that one after the other reach all ranks that sum the gradients of their parameters.
        device: Where this rank computes.
    """

    def __init__(
        self, units: Sequence[FSDPModule], among: Sequence[ProcessGroup], device: torch.device
    ) -> None:
        # Private in torch 2.11 to 2.13. Where a later torch sums zeros otherwise, nothing is noted, and such
        # parameters keep a gradient of zeros.
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        self._parameters = [parameter for group in groups for parameter in group.fsdp_params]
        for parameter in self._parameters:
            parameter.__class__ = _noting(type(parameter))
        self._groups = among
        self._device = device

    def drop(self) -> None:
        """Drop them; collective, and only a rank with such a parameter of its own waits for the device."""
        seen = [vars(parameter).pop(_SUMMED, set()) for parameter in self._parameters]
        idle = [place for place, summed in enumerate(seen) if summed == {"zeros"}]
        if is_fake() or not self._parameters:
            return
        uses = torch.ones(len(self._parameters), device=self._device)
        for place in idle:
            uses[place].zero_()
        for group in self._groups:
            dist.all_reduce(uses, group=group)
        if idle:
            counts = uses.tolist()
            for place in idle:
                if not counts[place]:
                    self._parameters[place].sharded_param.grad = None


_SUMMED = "_summed"
"""Attribute of torch's object for a parameter: whether a gradient was summed, zeros in its place, or both."""
_CLASSES: dict[type, type[FSDPParam]] = {}


def _noting(cls: type[FSDPParam]) -> type[FSDPParam]:
    """A class of torch that notes what it gives out to be summed.

    Of a module that is called twice, torch sums zeros before the gradient, which comes when both are done.
    """
    if cls in _CLASSES:
        return _CLASSES[cls]

    class Noting(cls):  # type: ignore[valid-type, misc]
        @property
        def unsharded_zero_grad_data(self) -> Tensor:
            return self._noted("zeros", super().unsharded_zero_grad_data)

        @property
        def unsharded_grad_data(self) -> Tensor:
            return self._noted("gradient", super().unsharded_grad_data)

        @property
        def unsharded_accumulated_grad_data(self) -> Tensor:
            return self._noted("gradient", super().unsharded_accumulated_grad_data)

        def _noted(self, what: str, given: Tensor) -> Tensor:
            self.__dict__.setdefault(_SUMMED, set()).add(what)
            return given

    _CLASSES[cls] = Noting
    return Noting
