"""When to log, evaluate, save and stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dist_env import get_logger

from .arguments import MinimalTrainingArguments
from .errors import ConfigurationError, DataError
from .state import TrainerState

logger = get_logger(__name__)


@dataclass(frozen=True)
class Periodic:
    """Due at multiples of a period, counted in absolute optimizer steps, so that a resume moves nothing."""

    strategy: str
    period: int
    first_step: bool = False
    delay: float = 0
    """Steps, or epochs with that strategy, before it is due for the first time."""

    def after_step(self, step: int) -> bool:
        """Whether it is due after this optimizer step."""
        if self.strategy != "steps" or step < self.delay:
            return False
        return step % self.period == 0 or (self.first_step and step == 1)

    def after_epoch(self, epochs: int) -> bool:
        """Whether it is due now that so many epochs are done."""
        return self.strategy == "epoch" and epochs >= self.delay


def batches_per_epoch(loader: object) -> int | None:
    """Length of a loader in batches, or None when it cannot tell."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        # Iterable loaders of torch say in this way that they have no length; so might a mistake in __len__.
        # What wraps a loader for several ranks has one whether or not the loader has.
        if hasattr(type(getattr(loader, "loader", loader)), "__len__"):
            logger.info("the length of the training loader (%s) is unknown: %s", type(loader).__name__, error)
        return None


def updates_per_epoch(loader: object, accumulation: int) -> int | None:
    """Optimizer steps per epoch; a last window that is not full counts as one."""
    batches = batches_per_epoch(loader)
    return None if batches is None else math.ceil(batches / accumulation)


def total_steps(args: MinimalTrainingArguments, per_epoch: int | None) -> int:
    """Optimizer steps at which the run ends, as far as that is known beforehand.

    Args:
        args: `max_steps` and `num_train_epochs`; the smaller limit wins.
        per_epoch: Optimizer steps per epoch, or None when the loader cannot tell.

    Returns:
        The number of steps, or -1 when only the end of the data will tell.

    Raises:
        ConfigurationError: For a fraction of an epoch of unknown length.
    """
    by_epochs = -1
    if args.num_train_epochs >= 0:
        if per_epoch is not None:
            by_epochs = math.floor(per_epoch * args.num_train_epochs + 1e-9)
        elif args.num_train_epochs != int(args.num_train_epochs):
            raise ConfigurationError(
                "num_train_epochs",
                args.num_train_epochs,
                "is a fraction of an epoch, and this data cannot tell how long an epoch is",
                "set a whole number of epochs, or max_steps and num_train_epochs=-1",
            )
    limits = [limit for limit in (by_epochs, args.max_steps) if limit >= 0]
    return min(limits, default=-1)


def set_length(state: TrainerState, args: MinimalTrainingArguments, loader: object | None) -> None:
    """Write into the state where the run ends and how long an epoch is, as far as known."""
    if loader is None:
        return
    state.epoch_train_steps = updates_per_epoch(loader, args.gradient_accumulation_steps)
    if state.epoch_train_steps == 0 and args.num_train_epochs and args.max_steps:
        raise DataError("the training loader has the length 0; give it data, or leave drop_last out")
    state.max_steps = total_steps(args, state.epoch_train_steps)
