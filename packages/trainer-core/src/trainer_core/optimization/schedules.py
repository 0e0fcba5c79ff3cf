"""Learning-rate schedules by name, stepped once per optimizer step.

The formulas are those of `transformers.get_scheduler` (transformers 5, module optimization), so that a run
moved here keeps its learning rates to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..arguments import MinimalTrainingArguments
from ..arguments.choices import DEFAULT_MIN_LR_RATE, check_schedule, needs_total
from ..errors import ConfigurationError


class PlateauSchedule(ReduceLROnPlateau):
    """`ReduceLROnPlateau`, fed after each evaluation; a scheduler and a callback in one.

    The loop's `step()` after an optimizer step changes nothing; `on_evaluate` takes the metric. So patience
    and cooldown count evaluations.

    Args:
        optimizer: Whose learning rates it drives.
        metric: Which of the evaluation's metrics; the prefix `eval_` may be left out.
        options: Those of `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    name = "reduce_lr_on_plateau"

    def __init__(self, optimizer: Optimizer, *, metric: str = "eval_loss", **options: Any) -> None:
        super().__init__(optimizer, **options)
        self.metric = metric
        self._training = False
        for group in optimizer.param_groups:
            # As other schedules note it, so that a reduced rate is told from the one it began with.
            group.setdefault("initial_lr", group["lr"])

    def step(self, metrics: SupportsFloat | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Take a value of the metric; without one, as after an optimizer step, do nothing."""
        if metrics is not None:
            super().step(metrics, epoch)

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Evaluations count from here on."""
        self._training = True

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Evaluations no longer count."""
        self._training = False

    def on_evaluate(
        self, args: object, state: object, control: object, *, metrics: Mapping[str, object], **_: object
    ) -> None:
        """Take the metric of an evaluation; those outside training do not count.

        Raises:
            ConfigurationError: If the evaluation does not give this metric, or gives no number.
        """
        if not self._training:
            return
        value = metrics.get(self.metric, metrics.get(f"eval_{self.metric}"))
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigurationError(
                "lr_scheduler_kwargs.metric",
                self.metric,
                f"is not a number in the metrics of the evaluation: {', '.join(sorted(metrics))}",
                "name one of these",
            )
        self.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Best value and counters, and the current rates; the options come from the arguments."""
        return {
            "best": float(self.best),
            "cooldown_counter": self.cooldown_counter,
            "num_bad_epochs": self.num_bad_epochs,
            "last_epoch": self.last_epoch,
            "last_lr": [float(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the counters of a saved schedule."""
        for key in ("best", "cooldown_counter", "num_bad_epochs", "last_epoch"):
            setattr(self, key, state_dict[key])
        self._last_lr = list(state_dict["last_lr"])


Factor = Callable[[int], float]
"""Maps the number of optimizer steps made to a factor of the initial learning rate."""


@dataclass(frozen=True)
class Constant:
    """The initial rate, after a linear warm-up."""

    warmup: int = 0

    def __call__(self, step: int) -> float:
        return _rise(step, self.warmup) if step < self.warmup else 1.0


@dataclass(frozen=True)
class Linear:
    """Down to zero in a straight line."""

    warmup: int
    total: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


@dataclass(frozen=True)
class Cosine:
    """Down along a cosine; half a cycle ends at `floor`."""

    warmup: int
    total: int
    cycles: float = 0.5
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        wave = _wave(_progress(step, self.warmup, self.total), self.cycles)
        return max(0.0, wave * (1 - self.floor) + self.floor)


@dataclass(frozen=True)
class CosineWithRestarts:
    """Half a cosine down to zero, `cycles` times, each from the full rate."""

    warmup: int
    total: int
    cycles: int = 1

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        progress = _progress(step, self.warmup, self.total)
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(self.cycles) * progress) % 1.0))))


@dataclass(frozen=True)
class CosineWithWarmupFloor:
    """A cosine to a floor that counts steps from one, so that the first step learns already.

    The warm-up rises from `warmup_floor`, or from one step's worth when that is not given.
    """

    warmup: int
    total: int
    cycles: float = 0.5
    floor: float = 0.0
    warmup_floor: float | None = None

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            if self.warmup_floor is None:
                return (step + 1.0) / max(1.0, self.warmup)
            return self.warmup_floor + (1.0 - self.warmup_floor) * step / max(1, self.warmup - 1)
        progress = (step - self.warmup + 1.0) / max(1.0, self.total - self.warmup)
        return max(0.0, _wave(progress, self.cycles) * (1 - self.floor) + self.floor)


@dataclass(frozen=True)
class Polynomial:
    """From `initial` to `end` (both learning rates) along a power of what is left."""

    warmup: int
    total: int
    initial: float
    end: float = 1e-7
    power: float = 1.0

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        if step > self.total or self.total == self.warmup:
            return self.end / self.initial
        left = 1 - (step - self.warmup) / (self.total - self.warmup)
        remaining: float = left**self.power
        return ((self.initial - self.end) * remaining + self.end) / self.initial


@dataclass(frozen=True)
class InverseSquareRoot:
    """One over the square root of the steps made, in units of `timescale` steps."""

    warmup: int
    timescale: int

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        return 1.0 / math.sqrt((step + self.timescale - self.warmup) / self.timescale)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Three stages: up from the floor, level, down to the floor."""

    warmup: int
    stable: int
    decay: int
    warmup_type: str = "linear"
    decay_type: str = "cosine"
    floor: float = 0.0
    cycles: float = 0.5

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self._above_floor(_ramp_up(self.warmup_type, _rise(step, self.warmup)))
        into_decay = step - self.warmup - self.stable
        if into_decay < 0:
            return 1.0
        if into_decay < self.decay:
            progress = into_decay / max(1, self.decay)
            return self._above_floor(_ramp_down(self.decay_type, progress, self.cycles))
        return self.floor

    def _above_floor(self, factor: float) -> float:
        return max(0.0, factor * (1.0 - self.floor) + self.floor)


def _rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _progress(step: int, start: int, end: int) -> float:
    return (step - start) / max(1, end - start)


def _wave(progress: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress))


def _ramp_up(kind: str, progress: float) -> float:
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    return progress if kind == "linear" else 1.0 - math.sqrt(1.0 - progress)


def _ramp_down(kind: str, progress: float, cycles: float) -> float:
    if kind == "cosine":
        return _wave(progress, cycles)
    return 1.0 - progress if kind == "linear" else 1.0 - math.sqrt(progress)


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
        self.differs = False
        """Whether the schedule whose state was loaded had another factor at its step."""
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at the current step."""
        factor = self.factor(self.last_epoch)
        return [group["initial_lr"] * factor for group in self.optimizer.param_groups]

    def apply(self) -> None:
        """Set the rates of the groups to those of the current step."""
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The step count, and the current factor and rates; the shape comes from the arguments."""
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "factor": float(self.factor(self.last_epoch)),
            "last_lr": [float(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step of a saved schedule, also of torch's `LambdaLR`."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("step_count", state_dict.get("_step_count", 1)))
        self._last_lr = list(state_dict.get("last_lr", state_dict.get("_last_lr", self._last_lr)))
        # Absent from old checkpoints, and from those of torch's schedules.
        factor = self.factor(self.last_epoch)
        self.differs = state_dict.get("factor", factor) != factor


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
    name = args.lr_scheduler_type
    check_schedule(name, args.lr_scheduler_kwargs)
    options = cast(dict[str, Any], dict(args.lr_scheduler_kwargs))  # of the types that were just checked
    if name == "reduce_lr_on_plateau":
        return PlateauSchedule(optimizer, **options)
    if total < 0 and needs_total(name, options):
        raise ConfigurationError(
            "lr_scheduler_type",
            name,
            "needs to know where the run ends, which this data cannot tell",
            "set max_steps or epoch_train_steps, or use constant_with_warmup or inverse_sqrt",
        )
    factor = _factor(name, args.warmup_steps, total, _initial_rate(optimizer), options)
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
            "lr_scheduler_kwargs.lr_end",
            end,
            f"must be below the learning rate {rate:g}",
            "choose a lower value",
        )
    return Polynomial(warmup, total, rate, end, options.get("power", 1.0))


def _warmup_stable_decay(warmup: int, total: int, options: dict[str, Any]) -> WarmupStableDecay:
    decay = options["num_decay_steps"]
    stable = options.get("num_stable_steps", total - warmup - decay)
    if stable < 0 or (0 <= total < warmup + stable):
        raise ConfigurationError(
            "lr_scheduler_kwargs",
            options,
            f"has warm-up ({warmup}), stable and decay ({decay}) stages that do not fit into {total} steps",
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
