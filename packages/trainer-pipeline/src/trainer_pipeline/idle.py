"""Modules before and after the blocks, on ranks and in stages that do not use what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def idle(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules return something of the right shape, and compute nothing."""
    before = [(module, vars(module).get("forward")) for module in modules]
    for module, _ in before:
        vars(module)["forward"] = idle_forward(module)
    try:
        yield
    finally:
        for module, forward in before:
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


def idle_forward(module: nn.Module) -> Callable[..., object]:
    """A forward that returns zeros for products and looked-up rows, and for all else what it is given."""
    if isinstance(module, nn.Linear):
        return partial(_no_product, module.out_features)
    if isinstance(module, nn.Embedding):
        return partial(_no_rows, module.embedding_dim, module.weight.dtype)
    return _given


def _no_product(features: int, x: Tensor) -> Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.new_zeros((*x.shape[:-1], features), dtype=dtype)


def _no_rows(features: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    return torch.zeros((), dtype=dtype, device=ids.device).expand(*ids.shape, features)


def _given(x: object, *args: object, **kwargs: object) -> object:
    return x
