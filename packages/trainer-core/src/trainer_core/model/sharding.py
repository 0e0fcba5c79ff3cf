"""What every trainer that uses `fully_shard` asks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that are gathered and dropped as one, outer ones first."""
    from torch.distributed.fsdp import FSDPModule  # takes seconds to import

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def add_up_gradients(model: nn.Module) -> list[FSDPModule]:
    """Have a sharded model add gradients up over the ranks: the loss is divided by the tokens of all of them.

    Args:
        model: The model, to which `fully_shard` has been applied.

    Returns:
        Its `fsdp_modules`.
    """
    units = fsdp_modules(model)
    for unit in units:
        _keep_name(type(unit))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # A rank whose batch leaves a parameter out takes part in the sum with zeros, as the others wait.
        zeros_for_unused = getattr(unit, "set_reduce_scatter_unused_params", None)
        if callable(zeros_for_unused):  # torch 2.11 does not have it
            zeros_for_unused(True)
    return units


def _keep_name(cls: type) -> None:
    """Call a class that torch has made for sharding by the name of the user's class, in logs and errors."""
    cls.__name__ = cls.__mro__[2].__name__
