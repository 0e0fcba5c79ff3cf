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
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from trainer_core import ConfigurationError, is_fake

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class UnusedParameters:
    """Drops the gradients of parameters that no rank has used since the last time.

    Args:
        model: The model, which knows the names of parameters.
        units: What is gathered by itself.
        among: Groups that one after the other reach all ranks that sum the gradients of their parameters.
        device: Where this rank computes.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FSDPModule],
        among: Sequence[ProcessGroup],
        device: torch.device,
    ) -> None:
        # Private in torch 2.11 to 2.13. Where a later torch sums zeros otherwise, nothing is noted, and such
        # parameters keep a gradient of zeros.
        groups = [group for unit in units for group in _groups_of(unit)]
        self._parameters = [parameter for group in groups for parameter in group.fsdp_params]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names.get(id(parameter.sharded_param)) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.__class__ = _noting(type(parameter))
        self._groups = among
        self._device = device

    def drop(self) -> None:
        """Drop them; collective, and only a rank with such a parameter of its own waits for the device.

        Raises:
            ConfigurationError: If others have used a parameter for which this rank has summed nothing, as
                torch 2.11 does: gradients of different parameters were added up.
        """
        seen: list[set[str]] = [vars(parameter).pop(_SUMMED, set()) for parameter in self._parameters]
        if is_fake() or not self._parameters:
            return
        idle = [
            place
            for place, (parameter, summed) in enumerate(zip(self._parameters, seen, strict=True))
            if any(seen) and "gradient" not in summed and parameter.sharded_param.requires_grad
        ]
        uses = torch.ones(len(self._parameters), device=self._device)
        for place in idle:
            uses[place].zero_()
        for group in self._groups:
            dist.all_reduce(uses, group=group)
        if idle:
            counts = uses.tolist()
            for place in idle:
                parameter = self._parameters[place]
                if not counts[place]:
                    parameter.sharded_param.grad = None
                elif not seen[place]:
                    raise ConfigurationError(
                        "model",
                        self._names[place],
                        "is a parameter that this rank has left out in a step in which others used it, and "
                        f"torch {torch.__version__} adds up gradients of different parameters then",
                        "use torch 2.12 or later, or let every rank use all parameters in each step",
                    )


def _groups_of(unit: FSDPModule) -> Sequence[FSDPParamGroup]:
    """What torch has made for the parameters of a unit; earlier it was one group, or none."""
    state = unit._get_fsdp_state()
    several: Sequence[FSDPParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    one = state._fsdp_param_group
    return [] if one is None else [one]


def drop_unsummed(unit: FSDPModule) -> None:
    """Drop the gradients that microbatches have left in gathered weights, to be summed with later ones."""
    for group in _groups_of(unit):
        for parameter in group.fsdp_params:
            # Private in torch 2.11 to 2.13; the second is there once a weight was gathered.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            vars(parameter).pop(_SUMMED, None)


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
