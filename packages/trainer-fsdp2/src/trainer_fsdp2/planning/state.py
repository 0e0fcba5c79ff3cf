"""Bytes of parameters, gradients and optimizer state on each rank, to the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer_core import ConfigurationError, build_optimizer

from ..arguments import FSDP2TrainingArguments
from ..units import refuse_unshardable
from .mesh import shard_rows
from .outline import reason

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
"""Makes an optimizer of named parameters, as the trainer takes it."""


class RankState(NamedTuple):
    """What one rank holds from step to step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The three together."""
        return sum(self)


class ShardedState(NamedTuple):
    """The state of one copy of the model."""

    ranks: tuple[RankState, ...]
    optimizer_name: str


def sharded_state(
    model: nn.Module,
    args: FSDP2TrainingArguments,
    shards: int,
    optimizer_factory: OptimizerFactory | None = None,
    *,
    ranks: int | None = None,
) -> ShardedState:
    """Build the optimizer of the run over each rank's shards, without values, and step it once.

    Args:
        model: From `outline`.
        args: Options of the optimizer.
        shards: Ranks that share one copy.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.
        ranks: How many of them to look at; all by default. The first is the fullest.

    Raises:
        ConfigurationError: If a parameter has no dimension to be cut along, or the optimizer cannot step
            without values.
    """
    if shards > 1:
        refuse_unshardable(model)
    lengths = sorted({len(parameter) for parameter in model.parameters() if parameter.ndim})
    known: dict[tuple[int, ...], RankState] = {}
    found, optimizer_name = [], ""
    for rank in range(shards if ranks is None else ranks):
        rows = tuple(shard_rows(length, shards, rank) for length in lengths)
        if rows not in known:
            rows_of = dict(zip(lengths, rows, strict=True))
            known[rows], optimizer_name = _rank_state(model, args, rows_of, optimizer_factory)
        found.append(known[rows])
    return ShardedState(tuple(found), optimizer_name)


def _rank_state(
    model: nn.Module,
    args: FSDP2TrainingArguments,
    rows_of: Mapping[int, int],
    optimizer_factory: OptimizerFactory | None,
) -> tuple[RankState, str]:
    """The built-in AdamW is quickest on fake tensors; others may read their step count, which meta allows."""
    mode = FakeTensorMode() if optimizer_factory is None else nullcontext()
    with mode:
        device = torch.device("cpu" if optimizer_factory is None else "meta")
        own = [(name, _shard(whole, rows_of, device)) for name, whole in model.named_parameters()]
        parameters = [parameter for _, parameter in own]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer = build_optimizer(args, model, named_parameters=own, factory=optimizer_factory)
        _step(optimizer)
    state = [optimizer.state[p] for p in parameters if p in optimizer.state]
    name = type(optimizer).__name__
    return RankState(_bytes(parameters), _bytes(trained), _bytes(tree_leaves(state))), name


def _shard(whole: nn.Parameter, rows_of: Mapping[int, int], device: torch.device) -> nn.Parameter:
    shape = (rows_of[len(whole)], *whole.shape[1:]) if whole.ndim else ()
    return nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=device), whole.requires_grad)


def _step(optimizer: Optimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigurationError(
            "optimizer_factory",
            type(optimizer).__name__,
            f"cannot step on the meta device, so that its state is not known beforehand ({reason(error)})",
            "plan with an optimizer of the same state, such as AdamW for two values per weight",
        ) from error


def _bytes(values: Sequence[object]) -> int:
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
