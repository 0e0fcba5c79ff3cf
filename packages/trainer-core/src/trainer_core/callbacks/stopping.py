"""The callbacks that end a run: the loss diverges, or an evaluation metric no longer improves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from dist_env import get_logger

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)

FEWEST_RECORDS = 8
"""Records before which no spike is called: mean and deviation of fewer say little."""
LEAST_DEVIATION = 0.01
"""Deviation taken at least, as a share of the mean: a flat curve must not make every wiggle a spike."""


class DivergenceDetector:
    """Ends training when a logged metric spikes `patience` records in a row, or is nan or infinite once.

    Acts at on_log_step, on every rank. A value is a spike if it lies more than `threshold` deviations above
    the mean of the last `window` values that were none. The deviation is that of those values, but at least
    1 % of their mean; the first 8 records are never spikes. Values and count are saved with each checkpoint.

    Args:
        metric: Key of the training record.
        window: Records of which mean and deviation are taken, 8 or more.
        threshold: Deviations above the mean from which on a value is a spike, above 0.
        patience: Spikes in a row after which the run ends, 1 or more.
        action: "abort" leaves without a checkpoint, so that the newest one is from before the spike was
            called; "stop" saves the state as it is.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    name = "divergence"

    def __init__(
        self,
        metric: str = "loss",
        window: int = 50,
        threshold: float = 6.0,
        patience: int = 3,
        action: Literal["stop", "abort"] = "abort",
    ) -> None:
        if window < FEWEST_RECORDS:
            raise ConfigurationError(
                "window", window, f"must be {FEWEST_RECORDS} or more", f"set it to {FEWEST_RECORDS} or more"
            )
        if not 0 < threshold < math.inf:
            raise ConfigurationError(
                "threshold", threshold, "must be above 0 and finite", "choose a value such as 6.0"
            )
        if patience < 1:
            raise ConfigurationError(
                "patience", patience, "must be 1 or more", "give a whole number, such as 3"
            )
        if action not in ("stop", "abort"):
            raise ConfigurationError("action", action, "must be 'stop' or 'abort'", "choose one of them")
        self.metric = metric
        self.threshold = threshold
        self.patience = patience
        self.action = action
        self.spikes_in_a_row = 0
        self._values: deque[float] = deque(maxlen=window)

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        """Judge one record.

        Raises:
            ConfigurationError: The record has no such number.
        """
        value = self._value(logs)
        if not math.isfinite(value):
            self._end(control, f"{self.metric} is {value} at step {state.global_step}")
        elif self._is_spike(value):
            self.spikes_in_a_row += 1
            finding = f"{self.metric} is {value:g} at step {state.global_step}, {self._usual()}"
            if self.spikes_in_a_row >= self.patience:
                self._end(control, f"{finding}; that is spike {self.spikes_in_a_row} in a row")
            else:
                logger.warning("DivergenceDetector: %s", finding)
        else:
            self.spikes_in_a_row = 0
            self._values.append(value)

    def state_dict(self) -> dict[str, object]:
        """The last values that were no spikes, and the spikes in a row."""
        return {"values": list(self._values), "spikes_in_a_row": self.spikes_in_a_row}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where a checkpoint left off; a smaller window keeps its newest values."""
        values, spikes = state["values"], state["spikes_in_a_row"]
        self._values.clear()
        if isinstance(values, Sequence):
            self._values.extend(float(value) for value in values)
        self.spikes_in_a_row = spikes if isinstance(spikes, int) else 0

    def _is_spike(self, value: float) -> bool:
        if len(self._values) < FEWEST_RECORDS:
            return False
        mean, deviation = self._mean_and_deviation()
        return value > mean + self.threshold * deviation

    def _mean_and_deviation(self) -> tuple[float, float]:
        mean = fmean(self._values)
        # Unlike `pstdev`, which adds up fractions, in microseconds.
        deviation = math.dist(self._values, [mean] * len(self._values)) / math.sqrt(len(self._values))
        return mean, max(deviation, LEAST_DEVIATION * abs(mean))

    def _usual(self) -> str:
        mean, deviation = self._mean_and_deviation()
        values = len(self._values)
        return f"above {mean:g} + {self.threshold:g} x {deviation:g} (mean and deviation of {values} records)"

    def _end(self, control: TrainerControl, finding: str) -> None:
        if self.action == "abort":
            control.should_abort_without_save = True
        else:
            control.should_training_stop = True
        logger.error("DivergenceDetector: %s; action: %s", finding, self.action)

    def _value(self, logs: Mapping[str, object]) -> float:
        value = logs.get(self.metric)
        if isinstance(value, int | float):
            return float(value)
        numbers = sorted(key for key, item in logs.items() if isinstance(item, int | float))
        raise ConfigurationError(
            "metric",
            self.metric,
            "is not a number in the training record",
            f"choose one of {', '.join(numbers)}, or add the callback that records it before this one",
        )


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
            raise ConfigurationError(
                "patience", patience, "must be 1 or more", "give a whole number, such as 3"
            )
        if not 0 <= min_delta < math.inf:
            raise ConfigurationError(
                "min_delta", min_delta, "must be 0 or more and finite", "give a number, such as 0.001"
            )
        if greater_is_better is None and not metric.endswith("loss"):
            raise ConfigurationError(
                "greater_is_better",
                None,
                f"has no default for metric={metric!r}, which is not a loss",
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
        """Continue counting where a checkpoint left off."""
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
            "is not a number among the evaluation's metrics",
            f"choose one of {', '.join(numbers) or 'them: there is none'}",
        )
