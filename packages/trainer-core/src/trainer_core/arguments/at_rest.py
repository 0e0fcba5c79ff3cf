"""Periods and limits that were set, of something that is off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .effects import Dependent, settings_at_rest

if TYPE_CHECKING:
    from .training import TrainingArguments


def said_in_vain(args: TrainingArguments, device_type: str, *, evaluates: bool) -> list[str]:
    """Lines to warn with: settings other than their defaults that nothing will read in this run.

    Args:
        args: The arguments.
        device_type: Where the run computes.
        evaluates: Whether there is evaluation data.
    """
    return settings_at_rest(args, _at_rest(args, device_type, evaluates))


def _at_rest(args: TrainingArguments, device_type: str, evaluates: bool) -> Iterator[Dependent]:
    if args.eval_strategy != "steps":
        condition = f"with eval_strategy={args.eval_strategy!r}"
        yield Dependent("eval_steps", condition, "set eval_strategy='steps'")
    if args.eval_strategy == "no":
        yield Dependent("eval_delay", "with eval_strategy='no'", "set eval_strategy")
    if not evaluates:
        for name in ("max_eval_steps", "per_device_eval_batch_size", "eval_on_save"):
            yield Dependent(name, "without an eval_dataset", "give one")
    if args.logging_strategy != "steps":
        condition = f"with logging_strategy={args.logging_strategy!r}"
        yield Dependent("logging_steps", condition, "set logging_strategy='steps'")
    if args.save_strategy != "steps":
        condition = f"with save_strategy={args.save_strategy!r}"
        yield Dependent("save_steps", condition, "set save_strategy='steps'")
    if args.save_strategy == "no":
        for name in ("save_total_limit", "save_on_each_node"):
            yield Dependent(name, "with save_strategy='no'", "set save_strategy")
    if 0 <= args.max_steps < args.speed_metrics_start_step:
        condition = f"in a run of max_steps={args.max_steps}"
        yield Dependent("speed_metrics_start_step", condition, "lower it")
    if device_type == "cpu":
        yield Dependent("gc_threshold", "on the CPU", "leave it at its default")
