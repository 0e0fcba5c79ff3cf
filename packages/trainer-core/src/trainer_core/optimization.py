"""The built-in AdamW, its parameter groups, and learning-rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .arguments import MinimalTrainingArguments
from .errors import ConfigurationError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]

_FUSED_DEVICES = ("cpu", "cuda", "xpu")


def build_adamw(args: MinimalTrainingArguments, named_parameters: NamedParameters) -> AdamW:
    """AdamW from the arguments; parameters of fewer than two dimensions (biases, norms) do not decay.

    Raises:
        ConfigurationError: If no parameter is trainable.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ConfigurationError("model", "frozen", "has no trainable parameter", "set requires_grad on some")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in trainable)
    return AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=fused,
    )


def build_schedule(args: MinimalTrainingArguments, optimizer: Optimizer, total: int) -> LRScheduler:
    """The schedule named by `lr_scheduler_type`, stepped once per optimizer step.

    Args:
        args: Type, its options and `warmup_steps`.
        optimizer: Whose learning rates it drives.
        total: Optimizer steps of the run; -1 when unknown.

    Raises:
        ConfigurationError: If the schedule needs the total and it is unknown.
    """
    name = args.lr_scheduler_type
    if name in ("constant", "constant_with_warmup"):
        factor = partial(_warmed_up, warmup=args.warmup_steps, after=lambda step: 1.0)
    else:
        if total < 0:
            raise ConfigurationError(
                "lr_scheduler_type",
                name,
                "needs to know where the run ends, and this data cannot tell",
                "set max_steps, or use constant_with_warmup",
            )
        floor = args.lr_scheduler_kwargs.get("min_lr_rate", 0.1) if name == "cosine_with_min_lr" else 0.0
        shape = _linear if name == "linear" else _cosine
        decay = partial(_decay, shape=shape, start=args.warmup_steps, end=total, floor=floor)
        factor = partial(_warmed_up, warmup=args.warmup_steps, after=decay)
    return LambdaLR(optimizer, factor)


def _warmed_up(step: int, *, warmup: int, after: Callable[[int], float]) -> float:
    return step / warmup if step < warmup else after(step)


def _decay(step: int, *, shape: Callable[[float], float], start: int, end: int, floor: float) -> float:
    share = min(1.0, (step - start) / max(1, end - start))
    return floor + (1.0 - floor) * shape(share)


def _linear(share: float) -> float:
    return 1.0 - share


def _cosine(share: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * share))
