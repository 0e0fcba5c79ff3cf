"""Activation checkpointing: blocks drop their activations and compute them again in the backward pass.

A block keeps its class, its parameter names and its hooks; only its `forward` is exchanged. So whatever hooks
do around a block, such as gathering its shards, happens once and not again in the recomputation.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import partial
from math import floor
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..errors import ConfigurationError
from .blocks import find_blocks

if TYPE_CHECKING:
    from ..arguments import TrainingArguments


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


_OPERATORS_SETTING = "activation_checkpointing_operators"

DEFAULT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.wait_tensor",
)
"""Matrix products, attention and collectives: what is slow to do again. Those that the installed torch does
not have are left out."""


_SPANS = ("profiler._record_function_enter_new", "profiler._record_function_exit")
"""What marks spans for a profiler. Experts that are sharded inside of a block open others when it
is recomputed, as their weights may be there already, and torch would miss these in its records."""


def operators(names: tuple[str, ...] | None) -> frozenset[OpOverload]:
    """Return the operators that keep their results, with all their overloads.

    Args:
        names: Names such as `mm`, `aten.mm`, `aten::mm` or `aten.mm.default`; None: `DEFAULT_OPERATORS`.

    Raises:
        ConfigurationError: If torch has no such operator, or if it is made of others, so that its result is
            never seen.
    """
    if names is None:
        return frozenset(_overloads(_packet(name) for name in DEFAULT_OPERATORS))
    return frozenset(_overloads(_named(name) for name in names))


def _named(name: str) -> OpOverloadPacket | OpOverload:
    found = _packet(name)
    if found is None:
        raise ConfigurationError(_OPERATORS_SETTING, name, "is not an operator of torch", _suggestion(name))
    for overload in _overloads([found]):
        if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            raise ConfigurationError(
                _OPERATORS_SETTING,
                name,
                "is decomposed into other operators, so it has no result of its own to save",
                "name those operators, such as aten.mm, aten.addmm and aten.bmm for a matrix product",
            )
        break
    return found


def _packet(name: str) -> OpOverloadPacket | OpOverload | None:
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) == 1:
        parts.insert(0, "aten")
    found: object = torch.ops
    for part in parts:
        if not part.isidentifier():
            return None
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverloadPacket | OpOverload) else None


def _overloads(found: Iterable[OpOverloadPacket | OpOverload | None]) -> Iterable[OpOverload]:
    for operator in found:
        if isinstance(operator, OpOverload):
            yield operator
        elif operator is not None:
            for overload in operator.overloads():
                yield getattr(operator, overload)


def _suggestion(name: str) -> str:
    known = {full.split(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    wanted = name if "." in name else f"aten.{name}"
    near = difflib.get_close_matches(wanted.replace("::", "."), sorted(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else "names look like aten.mm or aten.bmm"


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


RecomputeFn = Callable[[nn.Module], Iterable[nn.Module]]
"""Given the whole model, names those of its modules that are recomputed: a policy of one's own."""


def check_recompute_fn(args: TrainingArguments, function: RecomputeFn | None) -> None:
    """Refuse `custom` without a function, and a function that has no effect.

    Raises:
        ConfigurationError: If only one of them is given.
    """
    if function is None and args.recomputation == "custom":
        raise ConfigurationError(
            SETTING,
            "custom",
            "needs activation_checkpointing_fn",
            "give it to the trainer, or choose another mode",
        )
    if function is not None and args.recomputation != "custom":
        raise ConfigurationError(
            f"{SETTING}_fn",
            function,
            f"has no effect with {SETTING}={args.recomputation!r}",
            f"set {SETTING}='custom', or leave it out",
        )


def checkpoint_activations(
    model: nn.Module, args: TrainingArguments, function: RecomputeFn | None = None
) -> list[str]:
    """Exchange the forward of the blocks that the arguments choose.

    Takes effect in training mode while gradients are recorded; evaluation and generation run as before.
    Random numbers, such as dropout masks, are the same in the recomputation.

    Args:
        model: The model, before it is sharded or compiled.
        args: What to recompute.
        function: For `custom`: names the modules.

    Returns:
        Names of the blocks that are recomputed; none when the arguments ask for nothing.

    Raises:
        ConfigurationError: If the blocks are not found, an operator is unknown, no block is chosen, the
            function is missing or names what is not part of the model, or the model checkpoints activations
            already.
    """
    mode = args.recomputation
    if mode == "no":
        return []
    _refuse_second_switch(model, mode)
    if mode == "custom":
        check_recompute_fn(args, function)
        named = _named_by(function, model) if function is not None else {}
        for block in named.values():
            _exchange_forward(block, None)
        leave_caches_out(model)
        return list(named)
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


def _named_by(function: RecomputeFn, model: nn.Module) -> dict[str, nn.Module]:
    """The modules that a function names, by their names in the model, in its order."""
    setting, told = f"{SETTING}_fn", getattr(function, "__qualname__", type(function).__name__)
    chosen = function(model)
    names = {module: name for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for module in chosen if isinstance(chosen, Iterable) else (chosen,):
        if not isinstance(module, nn.Module) or module not in names:
            raise ConfigurationError(
                setting,
                told,
                f"names {type(module).__name__}, which is not a module inside {type(model).__name__}",
                "return modules of the model that it is given",
            )
        found[names[module]] = module
    if not found:
        raise ConfigurationError(
            setting, told, f"names no module of {type(model).__name__}", f"name one, or set {SETTING}='no'"
        )
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigurationError(
                setting,
                told,
                f"names both {name} and {outer} around it, which would compute it three times",
                "name one of the two",
            )
    return found


def selective_contexts(names: tuple[str, ...] | None) -> Contexts:
    """Contexts that keep the results of some operators and recompute the rest.

    Args:
        names: Operators, see `operators.operators`; None: matrix products, attention and collectives.

    Raises:
        ConfigurationError: If torch has no such operator.
    """
    SAC_IGNORED_OPS.update(_overloads(map(_packet, _SPANS)))
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
            rule = f"cannot be applied, because the model checkpoints activations already, at {where}"
            raise ConfigurationError(SETTING, mode, rule, f"set {SETTING}='no', or build the model without")
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigurationError(
                SETTING,
                mode,
                "cannot be combined with the model's own switch, gradient_checkpointing, which is on at "
                f"{where}",
                f"call model.gradient_checkpointing_disable(), or set {SETTING}='no'",
            )
