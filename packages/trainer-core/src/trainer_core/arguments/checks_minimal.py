"""Rules of `MinimalTrainingArguments`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import rules
from ..errors import ConfigurationError
from ..schedule_names import WITHOUT_WARMUP, check_schedule
from .effects import Dependent, refuse_without_effect

if TYPE_CHECKING:
    from .minimal import MinimalTrainingArguments

STRATEGIES = ("no", "steps", "epoch")
COMPILE_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_minimal(args: MinimalTrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    _check_counts(args)
    _check_length(args)
    _check_optimizer(args)
    if args.lr_scheduler_type:
        check_schedule(args.lr_scheduler_type, args.lr_scheduler_kwargs)
    _check_files(args)
    rules.one_of("torch_compile_mode", args.torch_compile_mode, COMPILE_MODES)
    refuse_without_effect(args, _unused(args))


def _check_counts(args: MinimalTrainingArguments) -> None:
    for name in (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "eval_steps",
        "logging_steps",
        "save_steps",
    ):
        rules.at_least(name, getattr(args, name), 1)
    for name in ("eval_strategy", "logging_strategy", "save_strategy"):
        rules.one_of(name, getattr(args, name), STRATEGIES)
    rules.at_least_or("max_steps", args.max_steps, 0, off=-1)
    rules.at_least_or("seed", args.seed, 0, off=-1)
    if args.seed >= 2**64:
        raise ConfigurationError(
            "seed", args.seed, "must be below 2**64, which is what torch takes", "choose a smaller one"
        )
    rules.at_least("warmup_steps", args.warmup_steps, 0)
    rules.at_least("dataloader_num_workers", args.dataloader_num_workers, 0)
    rules.within("eval_delay", args.eval_delay, 0, 1e12)
    if args.dataloader_prefetch_factor is not None:
        rules.at_least("dataloader_prefetch_factor", args.dataloader_prefetch_factor, 1)
    if args.save_total_limit is not None:
        rules.at_least("save_total_limit", args.save_total_limit, 1)


def _check_length(args: MinimalTrainingArguments) -> None:
    rules.within("num_train_epochs", args.num_train_epochs, -1e9, 1e9)
    if args.num_train_epochs < 0 and args.max_steps < 0 and not getattr(args, "max_train_seconds", None):
        raise ConfigurationError(
            "num_train_epochs",
            args.num_train_epochs,
            "a negative number means no limit by epochs, and max_steps=-1 means no limit by steps",
            "set max_steps or max_train_seconds, or an epoch count of 0 or more",
        )


def _check_optimizer(args: MinimalTrainingArguments) -> None:
    rules.within("learning_rate", args.learning_rate, 0.0, 1e3)
    rules.within("weight_decay", args.weight_decay, 0.0, 1e3)
    rules.within("adam_beta1", args.adam_beta1, 0.0, 1.0 - 1e-9)
    rules.within("adam_beta2", args.adam_beta2, 0.0, 1.0 - 1e-9)
    rules.within("adam_epsilon", args.adam_epsilon, 0.0, 1.0)
    if args.max_grad_norm is not None:
        rules.within("max_grad_norm", args.max_grad_norm, 0.0, 1e9)


def _check_files(args: MinimalTrainingArguments) -> None:
    if not args.output_dir:
        raise ConfigurationError("output_dir", args.output_dir, "must not be empty", "name a directory")
    for name in ("output_dir", "logging_dir", "resume_from_checkpoint"):
        value = getattr(args, name)
        if isinstance(value, str) and "\0" in value:
            raise ConfigurationError(
                name, value, "contains a NUL character, which no path may", "take it out of the name"
            )
    rules.within("lease_takeover_seconds", args.lease_takeover_seconds, 0.1, 30 * 86400.0)
    rules.within(
        "lease_heartbeat_seconds", args.lease_heartbeat_seconds, 0.01, args.lease_takeover_seconds / 3
    )
    if not args.save_safetensors:
        raise ConfigurationError(
            "save_safetensors",
            False,
            "asks for pickled weights, which run code when they are loaded",
            "leave it at true",
        )


def _unused(args: MinimalTrainingArguments) -> Iterator[Dependent]:
    if args.dataloader_num_workers == 0:
        condition = "while dataloader_num_workers is 0"
        for name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
            yield Dependent(name, condition, "set dataloader_num_workers")
    if not args.torch_compile:
        for name in ("backend", "mode", "dynamic", "full_graph"):
            yield Dependent(f"torch_compile_{name}", "while torch_compile is off", "set torch_compile=True")
    if args.lr_scheduler_type in ("", *WITHOUT_WARMUP):
        condition = f"with lr_scheduler_type={args.lr_scheduler_type!r}"
        yield Dependent(
            "warmup_steps", condition, "use a schedule that warms up, such as constant_with_warmup"
        )
    if not args.lr_scheduler_type:
        yield Dependent("lr_scheduler_kwargs", "without lr_scheduler_type", "name a schedule")
    if args.logging_strategy == "no":
        yield Dependent("logging_first_step", "with logging_strategy='no'", "set logging_strategy")
    if args.use_cpu:
        yield Dependent("device", "while use_cpu is on", "set use_cpu=False")
