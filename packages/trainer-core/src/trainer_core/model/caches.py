"""Key-value caches, which models of Hugging Face build in training too unless they are told not to."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def leave_caches_out(model: nn.Module) -> None:
    """Have a model make no key-value cache while it trains; generation keeps its own.

    A cache would hold every key and value for nothing, be extended a second time by a recomputed block, and
    make torch.compile compile each block anew, since the blocks differ in their place in it.

    Args:
        model: The outermost modules that take `use_cache` get False while they train with gradients.
    """
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
        return
    for part in model.children():
        leave_caches_out(part)


def _without_cache(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    if not (module.training and torch.is_grad_enabled()):
        return None
    return args, {**kwargs, "use_cache": False}
