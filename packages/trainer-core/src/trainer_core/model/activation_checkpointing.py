"""Activation checkpointing: blocks drop their activations and compute them again in the backward pass.

A block keeps its class, its parameter names and its hooks; only its `forward` is exchanged. So whatever hooks
do around a block, such as gathering its shards, happens once and not again in the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from fractions import Fraction
from math import floor
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import ConfigurationError
from .blocks import find_blocks
from .caches import leave_caches_out
from .operators import operators

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

SETTING = "activation_checkpointing"
Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]
_ORIGINAL = "_forward_before_checkpointing"
_MARK = "_activations_checkpointed"
_LARGEST_DENOMINATOR = 10_000


def blocks_to_checkpoint(
    count: int, mode: str, *, every: int | None = None, share: float | None = None
) -> set[int]:
    """Return the indices of the blocks that are recomputed.

    `every_n` takes the n-th, 2n-th and so on. `share` spaces them evenly: 1/2 takes every second, 1/3 the
    middle one of each three, 2/3 two of three (selective checkpointing of IBM and Meta's FSDP reports). In
    general, of the first k blocks it takes `k * share`, rounded half up.

    Args:
        count: Number of blocks.
        mode: full, every_n, share or operators.
        every: The n of `every_n`.
        share: The share of `share`, above 0 and at most 1.

    Raises:
        ConfigurationError: If that leaves no block, or for another mode.
    """
    if mode in ("full", "operators"):
        return set(range(count))
    if mode == "every_n" and every is not None:
        return _not_empty(set(range(every - 1, count, every)), count, "every", every)
    if mode == "share" and share is not None:
        p = Fraction(share).limit_denominator(_LARGEST_DENOMINATOR)
        taken = [floor(k * p + Fraction(1, 2)) for k in range(count + 1)]
        return _not_empty({k for k in range(count) if taken[k + 1] > taken[k]}, count, "share", share)
    raise ConfigurationError(
        SETTING,
        mode,
        "must be full, operators, every_n with activation_checkpointing_every, "
        "or share with activation_checkpointing_share",
        "choose one of these",
    )


def _not_empty(chosen: set[int], count: int, key: str, value: object) -> set[int]:
    if chosen:
        return chosen
    rule = f"recomputes none of the {count} blocks of the model"
    fix = "lower it" if key == "every" else "raise it"
    raise ConfigurationError(f"{SETTING}_{key}", value, rule, f"{fix}, or set {SETTING}='no'")


def checkpoint_activations(model: nn.Module, args: TrainingArguments) -> list[str]:
    """Exchange the forward of the blocks that the arguments choose.

    Takes effect in training mode while gradients are recorded; evaluation and generation run as before.
    Random numbers, such as dropout masks, are the same in the recomputation.

    Args:
        model: The model, before it is sharded or compiled.
        args: What to recompute.

    Returns:
        Names of the blocks that are recomputed; none when the arguments ask for nothing.

    Raises:
        ConfigurationError: If the blocks are not found, an operator is unknown, no block is chosen, or the
            model checkpoints activations already.
    """
    mode = args.recomputation
    if mode == "no":
        return []
    _refuse_second_switch(model, mode)
    contexts = selective_contexts(args.activation_checkpointing_operators) if mode == "operators" else None
    blocks = find_blocks(model, args.transformer_layers_path, needed_by=SETTING)
    chosen = blocks_to_checkpoint(
        len(blocks),
        mode,
        every=args.activation_checkpointing_every,
        share=args.activation_checkpointing_share,
    )
    names = []
    for index, (name, block) in enumerate(blocks):
        if index in chosen:
            _exchange_forward(block, contexts)
            names.append(name)
    leave_caches_out(model)
    return names


def selective_contexts(names: tuple[str, ...] | None) -> Contexts:
    """Contexts that keep the results of some operators and recompute the rest.

    Args:
        names: Operators, see `operators.operators`; None: matrix products, attention and collectives.

    Raises:
        ConfigurationError: If torch has no such operator.
    """
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_keep, operators(names)))


def _keep(
    kept: frozenset[OpOverload], context: object, operator: object, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _exchange_forward(block: nn.Module, contexts: Contexts | None) -> None:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    # Kept on the module, so that a copy of the module runs its own and not the original's.
    own = vars(block).get("forward")
    if own is not None:
        vars(block)[_ORIGINAL] = own

    @functools.wraps(type(block).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        original = functools.partial(type(self).forward, self) if own is None else vars(self)[_ORIGINAL]
        if not (self.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        call = functools.partial(original, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **options)

    vars(block)["forward"] = MethodType(forward, block)
    vars(block)[_MARK] = True


def _refuse_second_switch(model: nn.Module, mode: str) -> None:
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        if vars(module).get(_MARK) or "_checkpoint_wrapped_module" in module._modules:
            rule = f"the model checkpoints activations already, at {where}"
            raise ConfigurationError(SETTING, mode, rule, f"set {SETTING}='no', or build the model without")
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigurationError(
                SETTING,
                mode,
                f"the model has a switch of its own, gradient_checkpointing, that is on at {where}",
                f"call model.gradient_checkpointing_disable(), or set {SETTING}='no'",
            )
