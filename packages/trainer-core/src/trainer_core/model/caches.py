"""Key-value caches, which models of Hugging Face build in training too unless they are told not to."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import nn


def leave_caches_out(model: nn.Module) -> None:
    """Have a model make no key-value cache while it trains; generation keeps its own.

    A cache would hold every key and value for nothing, be extended a second time by a recomputed block, and
    make torch.compile compile each block anew, since the blocks differ in their place in it.

    Args:
        model: The outermost modules that take `use_cache` get False while they train with gradients.
    """
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters:
        positional = parameters["use_cache"].kind is not inspect.Parameter.KEYWORD_ONLY
        place = list(parameters).index("use_cache") if positional else None
        model.register_forward_pre_hook(partial(_without_cache, place), with_kwargs=True)
        return
    for part in model.children():
        leave_caches_out(part)


def _without_cache(
    place: int | None, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    if not (module.training and torch.is_grad_enabled()):
        return None
    if place is not None and len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}
