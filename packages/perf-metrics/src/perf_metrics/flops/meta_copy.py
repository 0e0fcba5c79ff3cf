"""A copy of a model without values, hooks or compiled code."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


class NotCopiedError(ValueError):
    """A part of the model cannot be copied; the message names it."""


def meta_copy(model: nn.Module) -> nn.Module:
    """Return the model with its parameters and buffers on the meta device.

    No memory for weights is needed, whatever the model's size. Sharded tensors become whole. Hooks are left
    out, compiled modules are as they were written, modes and `requires_grad` are kept.

    What compiles a module, or adds up gradients of ranks, is left out. An attribute that cannot be copied,
    such as a lock or an open file, is shared with the original.

    Args:
        model: The model, which stays as it is.

    Raises:
        NotCopiedError: It is not a module.
    """
    from torch import nn

    modules = list(model.modules())
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_bare_tensors(modules)):
        memo.setdefault(id(tensor), _without_values(tensor))
    for module in modules:
        # Made beforehand, so that hooks and what forbids copying (a sharded module does) are not met.
        bare: nn.Module = object.__new__(_written_class(module))
        memo[id(module)] = bare
    for module in reversed(modules):
        if (inner := _wrapped(module)) is not None:
            memo[id(module)] = memo[id(inner)]
    plain = nn.Module()
    hooks = {
        name for name, value in plain.__dict__.items() if isinstance(value, OrderedDict) and "hook" in name
    }
    for module in modules:
        if _wrapped(module) is None:
            clone = memo[id(module)]
            clone.__dict__.update({name: _copied(value, memo) for name, value in _state(module, hooks)})
            clone.__dict__.update({name: OrderedDict() for name in hooks})
    result = memo[id(model)]
    if not isinstance(result, nn.Module):
        raise NotCopiedError(f"{type(model).__name__} is not a module")
    return result


def _state(module: nn.Module, hooks: set[str]) -> Iterator[tuple[str, object]]:
    """What makes the module what it is; not what others have hung on it."""
    for name, value in vars(module).items():
        # Sharding keeps process groups there.
        if name not in hooks and not name.startswith("__composable_api_state"):
            yield name, None if name == "_compiled_call_impl" else value


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module within one that only compiles it, or adds up gradients of ranks."""
    inner = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}.get(type(module).__name__)
    return None if inner is None else module._modules.get(inner)


def _copied(value: object, memo: dict[int, object]) -> object:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - locks, files, loggers: what cannot be copied is shared
        return value


def _written_class(module: nn.Module) -> type:
    """The class that the author wrote, where sharding has put another one on top of it."""
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__mro__[1:3]):
        return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind.__mro__[1]
    return kind


def _bare_tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    """Tensors that modules hold as plain attributes."""
    import torch

    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _without_values(tensor: Tensor) -> Tensor:
    import torch
    from torch import nn

    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)
