"""Learning-rate schedules by name, stepped once per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..arguments import MinimalTrainingArguments
from ..errors import ConfigurationError
from ..schedule_names import DEFAULT_MIN_LR_RATE, check_schedule, needs_total
from .plateau import PlateauSchedule
from .schedule_shapes import (
    Constant,
    Cosine,
    CosineWithRestarts,
    CosineWithWarmupFloor,
    Factor,
    InverseSquareRoot,
    Linear,
    Polynomial,
    WarmupStableDecay,
)

SchedulerFactory = Callable[[Optimizer], LRScheduler]


class FactorSchedule(LRScheduler):
    """Multiplies each group's initial learning rate by one factor of the step.

    Like `LambdaLR`, with the factor computed once for all groups. The initial rates are read from the
    groups, so that what is saved does not depend on how many groups there are.

    Args:
        optimizer: Whose learning rates it drives.
        factor: Factor of the initial rate after a number of optimizer steps.
    """

    def __init__(self, optimizer: Optimizer, factor: Factor) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at the current step."""
        factor = self.factor(self.last_epoch)
        return [group["initial_lr"] * factor for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step count and the current rates; the shape comes from the arguments."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "last_lr": [float(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step of a saved schedule, also of torch's `LambdaLR`."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("step_count", state_dict.get("_step_count", 1)))
        self._last_lr = list(state_dict.get("last_lr", state_dict.get("_last_lr", self._last_lr)))


def build_schedule(args: MinimalTrainingArguments, optimizer: Optimizer, total: int) -> LRScheduler:
    """The schedule named by `lr_scheduler_type`.

    Args:
        args: Type, its options and `warmup_steps`.
        optimizer: Whose learning rates it drives.
        total: Optimizer steps of the run; -1 when unknown.

    Returns:
        The schedule. `reduce_lr_on_plateau` gives one that is a callback too (see `is_callback`).

    Raises:
        ConfigurationError: If the options do not fit, or the schedule needs the total and it is unknown.
    """
    name, options = args.lr_scheduler_type, dict(args.lr_scheduler_kwargs)
    check_schedule(name, options)
    if name == "reduce_lr_on_plateau":
        return PlateauSchedule(optimizer, **cast(dict[str, Any], options))
    if total < 0 and needs_total(name, options):
        raise ConfigurationError(
            "lr_scheduler_type",
            name,
            "needs to know where the run ends, and this data cannot tell",
            "set max_steps, or use constant_with_warmup or inverse_sqrt",
        )
    factor = _factor(name, args.warmup_steps, total, _initial_rate(optimizer), cast(dict[str, Any], options))
    return FactorSchedule(optimizer, factor)


def is_callback(scheduler: object) -> bool:
    """Whether a scheduler also has event handlers (`on_log`, `on_evaluate` and so on).

    Such a scheduler belongs among the callbacks of the run, so that it can react to what happens there.
    """
    return any(name.startswith("on_") and callable(getattr(scheduler, name)) for name in dir(type(scheduler)))


def _factor(name: str, warmup: int, total: int, rate: float, options: dict[str, Any]) -> Factor:
    """Put names and options of transformers together with our shapes."""
    match name:
        case "constant":
            return Constant()
        case "constant_with_warmup":
            return Constant(warmup)
        case "linear":
            return Linear(warmup, total)
        case "cosine":
            return Cosine(warmup, total, options.get("num_cycles", 0.5))
        case "cosine_with_restarts":
            return CosineWithRestarts(warmup, total, options.get("num_cycles", 1))
        case "cosine_with_min_lr":
            return Cosine(warmup, total, options.get("num_cycles", 0.5), _floor(options, rate))
        case "cosine_warmup_with_min_lr":
            cycles, rise = options.get("num_cycles", 0.5), options.get("warmup_lr_rate")
            return CosineWithWarmupFloor(warmup, total, cycles, _floor(options, rate), rise)
        case "polynomial":
            return _polynomial(warmup, total, rate, options)
        case "inverse_sqrt":
            return InverseSquareRoot(warmup, options.get("timescale") or warmup or 10_000)
    return _warmup_stable_decay(warmup, total, options)


def _floor(options: dict[str, Any], rate: float) -> float:
    """The floor of a cosine as a share of the initial rate."""
    if "min_lr" not in options:
        return float(options.get("min_lr_rate", DEFAULT_MIN_LR_RATE))
    if options["min_lr"] > rate:
        raise ConfigurationError(
            "lr_scheduler_kwargs.min_lr",
            options["min_lr"],
            f"is above the learning rate {rate:g}",
            "choose a floor below the learning rate",
        )
    return float(options["min_lr"] / rate) if rate else 0.0


def _polynomial(warmup: int, total: int, rate: float, options: dict[str, Any]) -> Polynomial:
    end = options.get("lr_end", 1e-7)
    if not end < rate:
        raise ConfigurationError(
            "lr_scheduler_kwargs.lr_end", end, f"must be below the learning rate {rate:g}", "lower it"
        )
    return Polynomial(warmup, total, rate, end, options.get("power", 1.0))


def _warmup_stable_decay(warmup: int, total: int, options: dict[str, Any]) -> WarmupStableDecay:
    decay = options["num_decay_steps"]
    stable = options.get("num_stable_steps", total - warmup - decay)
    if stable < 0 or (0 <= total < warmup + stable):
        raise ConfigurationError(
            "lr_scheduler_kwargs",
            options,
            f"warm-up ({warmup}), stable and decay ({decay}) stages do not fit into {total} steps",
            "shorten one of them, or train longer",
        )
    return WarmupStableDecay(
        warmup,
        stable,
        decay,
        options.get("warmup_type", "linear"),
        options.get("decay_type", "cosine"),
        options.get("min_lr_ratio", 0.0),
        options.get("num_cycles", 0.5),
    )


def _initial_rate(optimizer: Optimizer) -> float:
    rate = optimizer.defaults.get("lr", optimizer.param_groups[0].get("initial_lr"))
    return float(optimizer.param_groups[0]["lr"] if rate is None else rate)
