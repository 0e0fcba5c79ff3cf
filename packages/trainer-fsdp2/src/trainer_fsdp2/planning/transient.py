"""Bytes of whole weights and gradients that exist for a while on every rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ..arguments import FSDP2TrainingArguments
from ..full_sharding import resharding
from ..policy import precision_policy
from ..units import units_of
from .mesh import Mesh


class Transient(NamedTuple):
    """What exists for a while, in bytes."""

    gathered: int
    """Weights, whole: those of the layers that compute or come next, and of the root."""
    reduced: int
    """Gradients that travel: of the root, and of the layer whose turn it is."""
    accumulated: int
    """Gradients of earlier microbatches, whole, that wait for the last one."""


class _Size(NamedTuple):
    weights: int
    gradients: int
    travelling: int


def is_sharded(args: FSDP2TrainingArguments, mesh: Mesh) -> bool:
    """Whether `fully_shard` is applied: with several shards, or where only it can do what is asked."""
    return mesh.shards > 1 or args.fsdp2.param_dtype is not None or args.fsdp2.cpu_offload


def transient(model: nn.Module, args: FSDP2TrainingArguments, mesh: Mesh) -> Transient:
    """Count the weights and gradients that are whole at a time.

    Weights: the layer that computes and `prefetch_depth` others, and the root, which stays whole from its
    forward to the end of backward. All layers with `reshard_after_forward=False`; with a number, also the
    part of every layer that is kept. Gradients: those of the root wait for the end of backward; those of one
    layer exist in the dtype of computation, and once more in the dtype that travels. With
    `gradient_accumulation_steps` above 1 all gradients stay whole between the microbatches, unless they
    travel with each of them. Without shards there are only the buckets of DistributedDataParallel.

    Args:
        model: The model, from `outline`.
        args: The settings of fsdp2, and gradient_accumulation_steps.
        mesh: The ranks.

    Raises:
        ConfigurationError: If the layers are not found, or reshard_after_forward does not fit the ranks.
    """
    units, root = _sizes(model, args)
    if not is_sharded(args, mesh):
        whole = root.gradients + sum(unit.gradients for unit in units)
        return Transient(0, whole if mesh.replicas > 1 else 0, 0)
    accumulated = 0
    if args.keeps_whole_gradients:
        accumulated = root.travelling + sum(unit.travelling for unit in units)
    travelling = max(unit.travelling for unit in (root, *units))
    return Transient(
        gathered=root.weights + _weights_of_layers(units, args, mesh),
        reduced=root.gradients + max((unit.gradients for unit in units), default=0) + travelling,
        accumulated=accumulated,
    )


def _weights_of_layers(units: list[_Size], args: FSDP2TrainingArguments, mesh: Mesh) -> int:
    everything = sum(unit.weights for unit in units)
    reshard = resharding(args.fsdp2.reshard_after_forward, mesh.shards)
    if reshard is False:
        return everything
    at_once = min(len(units), 1 + (args.fsdp2.prefetch_depth or 1))
    layers = at_once * max((unit.weights for unit in units), default=0)
    if reshard is True:
        return layers
    return layers + everything // reshard


def _sizes(model: nn.Module, args: FSDP2TrainingArguments) -> tuple[list[_Size], _Size]:
    """Each unit of sharding, and the root with all that no unit holds."""
    taken: set[int] = set()
    units = [
        _size(module, args, taken) for _, module in units_of(model, args.fsdp2, args.transformer_layers_path)
    ]
    return units, _size(model, args, taken)


def _size(module: nn.Module, args: FSDP2TrainingArguments, taken: set[int]) -> _Size:
    policy = precision_policy(args.fsdp2)
    weights = gradients = travelling = 0
    for parameter in module.parameters():
        if id(parameter) in taken:
            continue
        taken.add(id(parameter))
        size = parameter.numel() * (policy.param_dtype or parameter.dtype).itemsize
        weights += size
        if parameter.requires_grad:
            gradients += size
            travels_as = policy.reduce_dtype or policy.param_dtype or parameter.dtype
            travelling += parameter.numel() * travels_as.itemsize
    return _Size(weights, gradients, travelling)
