"""Rules of `TrainingArguments`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import rules
from ..errors import ConfigurationError
from .effects import Dependent, refuse_without_effect

if TYPE_CHECKING:
    from .training import TrainingArguments

_CHOICES = {
    "construct_model_on": ("default", "meta", "device"),
    "activation_checkpointing": ("no", "full", "every_n", "share", "operators"),
    "torch_compile_scope": ("model", "blocks"),
}
_DETAILS = {"every": "every_n", "share": "share", "operators": "operators"}
"""Setting `activation_checkpointing_<key>` belongs to the mode `<value>`."""


def check_training(args: TrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    for name, choices in _CHOICES.items():
        rules.one_of(name, getattr(args, name), choices)
    rules.within("gc_threshold", args.gc_threshold, 0.0, 1.0)
    rules.at_least("speed_metrics_start_step", args.speed_metrics_start_step, 0)
    if args.gc_steps is not None:
        rules.at_least("gc_steps", args.gc_steps, 1)
    for name in ("peak_hardware_flops", "max_train_seconds"):
        _check_positive(args, name)
    _check_checkpointing(args)
    _check_memory_budget(args)
    if args.fuse_optim_with_backward:
        _check_fused_optimizer(args)
    refuse_without_effect(args, _unused(args))


def _check_positive(args: TrainingArguments, name: str) -> None:
    value = getattr(args, name)
    if value is not None and (not rules.is_number(value) or not value > 0):
        raise ConfigurationError(name, value, "must be a number above 0", "raise it, or leave it out")


def _check_checkpointing(args: TrainingArguments) -> None:
    if args.gradient_checkpointing and args.activation_checkpointing not in ("no", "full"):
        raise ConfigurationError(
            "gradient_checkpointing",
            True,
            f"means all blocks, and activation_checkpointing={args.activation_checkpointing!r} does not",
            "leave gradient_checkpointing out",
        )
    mode = args.recomputation
    if mode == "every_n":
        rules.at_least("activation_checkpointing_every", args.activation_checkpointing_every, 1)
    if mode == "share":
        rules.within("activation_checkpointing_share", args.activation_checkpointing_share, 0.0, 1.0)


def _check_memory_budget(args: TrainingArguments) -> None:
    budget = args.activation_memory_budget
    if budget is None:
        return
    rules.within("activation_memory_budget", budget, 0.0, 1.0)
    if not args.torch_compile:
        raise ConfigurationError(
            "activation_memory_budget", budget, "is kept by the compiler only", "set torch_compile=True"
        )
    if args.recomputation != "no":
        raise ConfigurationError(
            "activation_memory_budget",
            budget,
            "lets the compiler choose what to recompute, and activation_checkpointing has chosen already",
            "leave one of them out",
        )


def _check_fused_optimizer(args: TrainingArguments) -> None:
    setting, fix = "fuse_optim_with_backward", "leave one of them out"
    if args.max_grad_norm:
        rule = f"excludes max_grad_norm={args.max_grad_norm}: the norm is known only after the last step"
        raise ConfigurationError(setting, True, rule, fix)
    if args.gradient_accumulation_steps > 1:
        rule = (
            f"excludes gradient_accumulation_steps={args.gradient_accumulation_steps}: "
            "each backward pass would be an optimizer step"
        )
        raise ConfigurationError(setting, True, rule, fix)
    if args.mixed_precision == "fp16":
        rule = "excludes mixed_precision='fp16': the gradients are still scaled when they appear"
        raise ConfigurationError(setting, True, rule, "use bf16, or leave one of them out")
    if args.nonfinite_policy == "skip":
        rule = "excludes nonfinite_policy='skip': weights have moved before the norm is known"
        raise ConfigurationError(setting, True, rule, "use stop or raise")


def _unused(args: TrainingArguments) -> Iterator[Dependent]:
    for key, mode in _DETAILS.items():
        if args.recomputation != mode:
            yield Dependent(
                f"activation_checkpointing_{key}",
                f"with activation_checkpointing={args.recomputation!r}",
                f"set activation_checkpointing={mode!r}",
            )
    if args.seed < 0:
        yield Dependent("seed_per_rank", "without a seed", "set seed")
    if not args.torch_compile:
        yield Dependent("torch_compile_scope", "while torch_compile is off", "set torch_compile=True")
    if not args.uses_blocks:
        yield Dependent(
            "transformer_layers_path",
            "without activation_checkpointing or torch_compile_scope='blocks'",
            "set one of them",
        )
