"""A schedule that lowers the learning rate when an evaluation metric no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

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
                f"is no number in the metrics of the evaluation: {', '.join(sorted(metrics))}",
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
        """Go on with the counters of a saved schedule."""
        for key in ("best", "cooldown_counter", "num_bad_epochs", "last_epoch"):
            setattr(self, key, state_dict[key])
        self._last_lr = list(state_dict["last_lr"])
