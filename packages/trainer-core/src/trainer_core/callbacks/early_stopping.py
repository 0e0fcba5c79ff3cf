"""The callback that stops when an evaluation metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dist_env import get_logger

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)


class EarlyStopping:
    """Stops training after `patience` evaluations in a row without improvement.

    Acts at on_evaluate during training, on every rank; it asks for a stop with a final checkpoint. An
    evaluation improves if it is better than the best one so far by more than `min_delta`; the best one is the
    best value seen, whether it counted as an improvement or not (as in Hugging Face's EarlyStoppingCallback).
    A value that is not finite never improves. Best value and count are saved with each checkpoint.

    Args:
        metric: Key of the evaluation's metrics; `eval_` in front may be left out.
        patience: Evaluations without improvement after which to stop, 1 or more.
        min_delta: Improvement that is too small to count, in units of the metric, 0 or more.
        greater_is_better: Direction. Not given: False for a name that ends in "loss"; others need it.

    Raises:
        ConfigurationError: An argument is out of range, or the direction is not known.
    """

    name = "early_stopping"

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        greater_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            raise ConfigurationError("patience", patience, "must be 1 or more", "give a whole number")
        if not 0 <= min_delta < math.inf:
            raise ConfigurationError("min_delta", min_delta, "must be 0 or more and finite", "change it")
        if greater_is_better is None and not metric.endswith("loss"):
            raise ConfigurationError(
                "greater_is_better",
                None,
                f"has no default for metric={metric!r}, which is no loss",
                "set greater_is_better=True (as for an accuracy) or False (as for a perplexity)",
            )
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.greater_is_better = bool(greater_is_better)
        self.best: float | None = None
        self.evaluations_without_improvement = 0
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """From here on, evaluations count."""
        self._training = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Evaluations after training do not count."""
        self._training = False

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: Mapping[str, object],
        **_: object,
    ) -> None:
        """Compare with the best value, and ask for a stop when patience is at its end.

        Raises:
            ConfigurationError: The evaluation has no such metric.
        """
        if not self._training:
            return
        self._compare(self._value(metrics))
        if self.evaluations_without_improvement >= self.patience:
            control.should_training_stop = True
            logger.info(
                "EarlyStopping: %s has not improved on %s by more than %g in %d evaluations; stop at step %d",
                self.metric,
                self.best,
                self.min_delta,
                self.evaluations_without_improvement,
                state.global_step,
            )

    def state_dict(self) -> dict[str, object]:
        """Best value and count."""
        return {"best": self.best, "evaluations_without_improvement": self.evaluations_without_improvement}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on counting where a checkpoint left off."""
        best, count = state["best"], state["evaluations_without_improvement"]
        self.best = float(best) if isinstance(best, int | float) else None
        self.evaluations_without_improvement = count if isinstance(count, int) else 0

    def _compare(self, value: float) -> None:
        gain = self._gain(value)
        self.evaluations_without_improvement += 1
        if gain > self.min_delta:
            self.evaluations_without_improvement = 0
        if gain > 0:
            self.best = value

    def _gain(self, value: float) -> float:
        if not math.isfinite(value):
            return -math.inf
        if self.best is None:
            return math.inf
        return value - self.best if self.greater_is_better else self.best - value

    def _value(self, metrics: Mapping[str, object]) -> float:
        for key in (self.metric, f"eval_{self.metric}"):
            value = metrics.get(key)
            if isinstance(value, int | float):
                return float(value)
        numbers = sorted(key for key, value in metrics.items() if isinstance(value, int | float))
        raise ConfigurationError(
            "metric",
            self.metric,
            "is no number among the evaluation's metrics",
            f"choose one of {', '.join(numbers) or 'them: there is none'}",
        )
