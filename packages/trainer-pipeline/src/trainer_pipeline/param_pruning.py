"""Keep of a model what a rank's stages hold; the rest holds no weights and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def names_held(model: nn.Module, stages: Iterable[nn.Module]) -> set[str]:
    """Names of the model's parameters that stages have; a tied one under its first name."""
    held = {id(parameter) for stage in stages for parameter in stage.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def release_rest(model: nn.Module, held: set[str], blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Take every parameter that is not held out of a model, in place.

    A block that holds nothing loses its buffers too; it is never called. Outside the blocks the model's
    forward still goes through modules whose results are not used on this rank: something that is not a number
    and takes no memory stands in for their parameters.

    Args:
        model: The model; parameters on the meta device.
        held: Names of the parameters to keep.
        blocks: Those that other stages may have.
        device: Where the model computes.
    """
    kept = {id(parameter) for name, parameter in model.named_parameters() if name in held}
    inside: set[nn.Module] = set()
    for block in blocks:
        inside.update(block.modules())
        if not any(id(parameter) in kept for parameter in block.parameters()):
            for module in block.modules():
                module._buffers.update(dict.fromkeys(module._buffers))
    for module in model.modules():
        gone = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in kept
        ]
        for name in gone:
            if module in inside:
                module._parameters[name] = None
            else:
                _stand_in(module, name, device)


def _stand_in(module: nn.Module, name: str, device: torch.device) -> None:
    parameter = module._parameters.pop(name)
    if parameter is None:
        return
    value = torch.nan if parameter.is_floating_point() else 0
    stand_in = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    module.register_buffer(name, stand_in, persistent=False)
    # A product with it would first lay it out in memory, at full size.
    forward = instead_of(module)
    if forward is not None:
        vars(module)["forward"] = forward


@contextmanager
def idle(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which modules return something of the right shape, and compute nothing.

    Those that compute something of their own continue doing so.
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

    What it returns is not a number, so that a model that uses it after all does not continue unnoticed.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(_no_product, module.out_features)
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        return partial(_no_rows, module.embedding_dim, module.weight.dtype)
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
