"""An estimate of the activations: one microbatch, forward and backward, on tensors without values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from trainer_core import ConfigurationError, EagerExecutor, LiveBytes, TokenLoss, attention_of_gpus, loss_of

from ..arguments import FSDP2TrainingArguments
from ..policy import precision_policy
from ..units import units_of
from .mesh import Mesh
from .outline import exchange_tensors, reason
from .transient import is_sharded

_HOST = torch.device("cpu")


class Activations(NamedTuple):
    """Bytes of one microbatch on one rank, without parameters, buffers and their gradients."""

    saved: int
    """What is kept from the forward pass for the backward pass."""
    peak: int
    """Most at a time: what is kept, and what comes and goes around the loss and in recomputed blocks."""


def estimate_activations(
    model: nn.Module, args: FSDP2TrainingArguments, mesh: Mesh, batch: Mapping[str, Tensor]
) -> Activations:
    """Run one microbatch on fake tensors, and watch what is alive.

    The tensors are those of a CPU, where attention takes the flash kernel as on a GPU: no matrix of sequence
    by sequence is kept. Weights and inputs of layers are in the dtype that they are gathered in; autocast
    keeps its casts of weights, as it does in training. Kernels of other packages for the fused loss are
    stood in for by the chunked one.

    Args:
        model: From `outline`; the model is used up.
        args: Precision, loss and which layers are sharded.
        mesh: The ranks.
        batch: What a rank gets at a time; only shapes and dtypes count.

    Raises:
        ConfigurationError: If the model or the loss cannot run without values.
    """
    dtype = precision_policy(args.fsdp2).param_dtype if is_sharded(args, mesh) else None
    layers = (
        []
        if dtype is None
        else [module for _, module in units_of(model, args.fsdp2, args.transformer_layers_path)]
    )
    loss = _loss(model, args)  # before the tensors are exchanged: a head with others would be refused
    with FakeTensorMode(allow_non_fake_inputs=True):
        exchange_tensors(model, lambda tensor: _fake(tensor, dtype))
        for module in (model, *layers):
            _cast_inputs(module, dtype)
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        inputs = {name: _fake(value, None) for name, value in batch.items()}
        try:
            return _watch(model, loss, args, inputs)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                "model_init",
                type(model).__name__,
                f"cannot run on tensors without values ({reason(error)})",
                "take what reads values, such as .item() or `if tensor:`, out of the forward pass",
            ) from error


def _watch(
    model: nn.Module, loss: TokenLoss, args: FSDP2TrainingArguments, batch: Mapping[str, Tensor]
) -> Activations:
    executor = EagerExecutor(model, args, _HOST)
    live = LiveBytes([*model.parameters(), *model.buffers()])
    for tensor in batch.values():
        live.add(tensor)
    with live, attention_of_gpus(args):
        total = executor.forward(batch, loss).loss
        saved = live.now
        total.backward()  # type: ignore[no-untyped-call]
    return Activations(saved, live.peak)


def _loss(model: nn.Module, args: FSDP2TrainingArguments) -> TokenLoss:
    stands_in = args.fused_loss in ("liger", "cut")
    return loss_of(replace(args, fused_loss="chunked") if stands_in else args, model)


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor without values that says it is on the host; parameters in the dtype they are gathered in."""
    cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device=_HOST)


def _cast_inputs(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Have a module cast what it is given, as `fully_shard` does."""
    if dtype is None:
        return

    def cast(value: object) -> object:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if isinstance(value, Tensor) and floating else value

    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return tree_map(cast, args), tree_map(cast, kwargs)

    module.register_forward_pre_hook(before, with_kwargs=True)  # type: ignore[arg-type]


def _drop_gradient(parameter: Tensor) -> None:
    """Gradients are counted with the state, and travel as soon as a layer has them all."""
    parameter.grad = None
