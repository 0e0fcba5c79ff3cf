"""Modules before and after the blocks, on ranks and in stages that do not use what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def idle(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules return something of the right shape, and compute nothing.

    Those that compute something of their own go on doing so.
    """
    before = [
        (module, vars(module).get("forward"), idle_forward)
        for module in modules
        if (idle_forward := instead_of(module)) is not None
    ]
    for module, _, forward in before:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own, _ in before:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


def instead_of(module: nn.Module) -> Callable[..., object] | None:
    """A forward that computes nothing, for products, looked-up rows and norms; None for other modules.

    What it returns is not a number, so that a model that uses it after all does not go on unnoticed.
    """
    if type(module).forward is nn.Linear.forward:
        return partial(_no_product, int(module.out_features))  # type: ignore[arg-type]
    if type(module).forward is nn.Embedding.forward:
        return partial(_no_rows, int(module.embedding_dim), module.weight.dtype)  # type: ignore[arg-type]
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        return _given
    return None


def _no_product(features: int, x: Tensor) -> Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.new_full((*x.shape[:-1], features), torch.nan, dtype=dtype)


def _no_rows(features: int, dtype: torch.dtype, ids: Tensor) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=ids.device).expand(*ids.shape, features)


def _given(x: Tensor) -> Tensor:
    return x
