"""Callbacks that add tokens, FLOPs, net seconds, throughput and MFU to each log record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Protocol

from ..logs.log_file import is_evaluation, is_training
from ..throughput import StretchTimer
from ..utilization import (
    check_flops_per_token,
    check_peak,
    job_peak_flops,
    model_flops_utilization,
    wait_for_device,
)
from . import EventHandlers

_logger = logging.getLogger("perf_metrics")


class CountingState(Protocol):
    """What a `transformers.TrainerState` has counted, summed over all processes."""

    num_input_tokens_seen: int
    """Tokens, as `TrainingArguments(include_num_input_tokens_seen=...)` wants them counted."""
    total_flos: float
    """6 x positions x parameters outside embeddings, brought up to date before each record."""
    is_world_process_zero: bool
    """Whether this process is the one that speaks for the job."""


class StepControl(Protocol):
    """What comes after a step."""

    should_evaluate: bool
    should_save: bool


class IntervalCounts(EventHandlers):
    """Adds the raw counts of each log interval to the records of `transformers.Trainer`.

    With them `DefaultMetrics` works there as elsewhere. Put this callback first. The integrations named in
    `TrainingArguments(report_to=...)` act before all callbacks given to the trainer, and neither they nor
    `state.log_history` have the added entries.

    | added | from | absent when |
    |---|---|---|
    | `interval_seconds` | the clock, less evaluation, saving and compilation | |
    | `data_wait_share` | time between steps that is neither of these | |
    | `input_tokens` | `state.num_input_tokens_seen` | `include_num_input_tokens_seen="no"` |
    | `compute_tokens` | `state.total_flos`, which counts padding too | the model is not a `PreTrainedModel` |
    | `flos` | `flops_per_token` x `compute_tokens` | either is missing |
    | `peak_flops` | the peaks of all devices, for the type that arguments and model compute in | `flos` is |

    With `TrainingArguments(include_num_input_tokens_seen="non_padding")` the input tokens are those that the
    attention mask keeps. With "all" padding counts as input too, which is the same where rows are packed.
    Counts are over all processes; ranks that hold parts of one model count their common batch once each.

    That trainer has no event for the beginning of an evaluation or a save. The time between two events is
    judged by the event at its end: up to `on_prediction_step` and `on_evaluate` it was evaluation, up to
    `on_save` a save, up to `on_step_begin` waiting for data, and training otherwise. The first interval
    begins at `on_train_begin`.

    Args:
        flops_per_token: Model FLOPs of a training step per position, such as
            `model_flops_per_token(model, sequence_length)`. None: no `flos`.
        clock: Returns seconds from any fixed origin and never goes back.

    Raises:
        ValueError: `flops_per_token` is not a positive number.
    """

    def __init__(
        self, flops_per_token: float | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        check_flops_per_token(flops_per_token)
        self.flops_per_token = flops_per_token
        self._timer = StretchTimer(clock)
        self._predicting = False
        self._counter = _Counter("no", None)
        self._peak: float | None = None

    def on_train_begin(
        self, args: object, state: CountingState, control: object, *, model: object = None, **_: object
    ) -> None:
        """Begin the first interval, and say what cannot be counted."""
        self._counter = _Counter(_what_is_counted(args), _flos_of_a_position(model))
        self._counter.advance(state)
        self._predicting = False
        if state.is_world_process_zero:
            self._warn()
        if self.flops_per_token is not None:
            self._peak = job_peak_flops(model, _autocast_dtype(args))
        self._timer.start()

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Stop timing."""
        self._timer.stop()

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """The batches are there."""
        self._timer.end("data")

    def on_step_end(self, args: object, state: object, control: StepControl, **_: object) -> None:
        """The step has been queued, if not done."""
        if control.should_evaluate or control.should_save:
            # Else queued training would pass for the evaluation or the save that follows.
            wait_for_device()
        self._timer.end("train")

    def on_prediction_step(self, args: object, state: object, control: object, **_: object) -> None:
        """A batch of an evaluation is done."""
        self._predicting = True
        self._timer.end("evaluate")

    def on_evaluate(self, args: object, state: object, control: object, **_: object) -> None:
        """An evaluation is over."""
        self._predicting = False
        self._timer.end("evaluate")

    on_predict = on_evaluate  # not part of training either

    def on_save(self, args: object, state: object, control: object, **_: object) -> None:
        """A checkpoint has been written, or is about to be uploaded."""
        self._timer.end("save")

    on_push_begin = on_memory_save = on_save

    def on_log(
        self,
        args: object,
        state: CountingState,
        control: object,
        *,
        logs: MutableMapping[str, object],
        **_: object,
    ) -> None:
        """Add the counts to the record of an interval."""
        self._timer.end("evaluate" if self._predicting or is_evaluation(logs) else "train")
        if not is_training(logs) or "interval_seconds" in logs:
            return
        interval = self._timer.take()
        input_tokens, compute_tokens = self._counter.advance(state)
        logs["interval_seconds"] = interval.net_seconds
        logs["data_wait_share"] = interval.data_wait_share
        if input_tokens is not None:
            logs["input_tokens"] = input_tokens
        if compute_tokens is not None:
            logs["compute_tokens"] = compute_tokens
            if self.flops_per_token is not None:
                logs["flos"] = self.flops_per_token * compute_tokens
                logs.setdefault("peak_flops", self._peak)

    def _warn(self) -> None:
        if self._counter.tokens == "no":
            _logger.warning(
                "the log will have no input_tokens and no tok_per_sec: "
                "include_num_input_tokens_seen='no' lets the trainer count no tokens; "
                "set TrainingArguments(include_num_input_tokens_seen='non_padding'), "
                "or 'all' where the rows hold no padding"
            )
        if self.flops_per_token is not None and not self._counter.counts_positions:
            _logger.warning(
                "the log will have no flos and no mfu: the trainer counts positions only for models with "
                "num_parameters(), such as a PreTrainedModel; where the rows hold no padding, "
                "TrainingArguments(include_num_input_tokens_seen='all') counts them as well"
            )


@dataclass
class _Counter:
    """Takes differences of the trainer's totals.

    Attributes:
        tokens: What `num_input_tokens_seen` counts: "no", "all" or "non_padding".
        flos_of_a_position: What `total_flos` grows by for each position; None where it does not grow.
    """

    tokens: str
    flos_of_a_position: int | None
    _tokens_before: int = 0
    _flos_before: float = 0.0

    @property
    def counts_positions(self) -> bool:
        return self.flos_of_a_position is not None or self.tokens == "all"

    def advance(self, state: CountingState) -> tuple[int | None, int | None]:
        """Return the input tokens and the positions since the last call, None where they are not known."""
        tokens = state.num_input_tokens_seen - self._tokens_before
        flos = state.total_flos - self._flos_before
        self._tokens_before, self._flos_before = state.num_input_tokens_seen, state.total_flos
        # 0 in an interval that trained means that the model's input has another name: unknown.
        input_tokens = tokens if self.tokens != "no" and tokens > 0 else None
        if self.flos_of_a_position is not None and flos > 0:
            return input_tokens, round(flos / self.flos_of_a_position)
        return input_tokens, input_tokens if self.tokens == "all" else None


def _what_is_counted(args: object) -> str:
    setting = getattr(args, "include_num_input_tokens_seen", "no")
    return setting if isinstance(setting, str) else "no"


def _autocast_dtype(args: object) -> str | None:
    """The type of the matrix products that `TrainingArguments` ask for; None leaves it to the model."""
    return next((name for name in ("bf16", "fp16", "tf32") if getattr(args, name, None) is True), None)


def _flos_of_a_position(model: object) -> int | None:
    """What `Trainer.floating_point_ops` adds for each position."""
    count: Callable[..., int] | None = getattr(model, "num_parameters", None)
    return 6 * count(exclude_embeddings=True) or None if callable(count) else None


_NO_COUNTS = (
    "DefaultMetrics adds nothing to the log: the records of this trainer have no interval_seconds. Put "
    "IntervalCounts() before it, with FLOPs per token for mfu: callbacks=[IntervalCounts("
    "model_flops_per_token(model, sequence_length)), PeakMemory(), DefaultMetrics(), ...], and set "
    "TrainingArguments(include_num_input_tokens_seen='non_padding') for tok_per_sec"
)


class DefaultMetrics(EventHandlers):
    """Adds `tok_per_sec`, `mfu`, `hfu` and `peak_mem` to the log record.

    | added | from | absent when |
    |---|---|---|
    | `tok_per_sec` | `input_tokens` / `interval_seconds` | either is missing |
    | `mfu` | `flos` / (`interval_seconds` x peak); None if the peak is unknown | FLOPs or time are missing |
    | `hfu` | the same from `hardware_flos`, with what is recomputed | these are missing |
    | both, of a whole run | `flops_per_second`, `hardware_flops_per_second` | these are missing |
    | `peak_mem` | `peak_mem_allocated`, bytes per rank | there is no accelerator |

    `interval_seconds` is net wall time: it contains data loading and the optimizer, and leaves out evaluation
    and saving. Put this callback before those that show or store records, and after those that count.

    It acts in `on_log_step`, before any other callback sees the record, where the trainer has that event, and
    in `on_log` otherwise. Both give the same entries. `transformers.Trainer` puts no counts into its records:
    there it needs `IntervalCounts` before it, and warns once where that is missing.

    Args:
        peak_hardware_flops: Peak FLOP/s summed over every device of the job, for the type that the matrix
            multiplications run in. None: what the record has as `peak_flops`, if it has it.

    Raises:
        ValueError: `peak_hardware_flops` is not a positive finite number.
    """

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        if peak_hardware_flops is not None:
            check_peak("peak_hardware_flops", peak_hardware_flops)
        self.peak_hardware_flops = peak_hardware_flops
        self._has_warned = False

    def on_log_step(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the derived entries to `logs`."""
        self._add_rates(logs)
        # Of the final metrics.
        self._add_share(logs, "mfu", "flops_per_second", 1.0)
        self._add_share(logs, "hfu", "hardware_flops_per_second", 1.0)
        if "peak_mem_allocated" in logs:
            logs["peak_mem"] = logs["peak_mem_allocated"]

    def on_log(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the derived entries to `logs`, if `on_log_step` has not done so; say what that lacks."""
        speaks = not self._has_warned and getattr(state, "is_world_process_zero", True)
        if speaks and is_training(logs) and "interval_seconds" not in logs:
            self._has_warned = True
            _logger.warning(_NO_COUNTS)
        self.on_log_step(args, state, control, logs=logs)

    def _add_rates(self, logs: MutableMapping[str, object]) -> None:
        seconds = _number(logs, "interval_seconds")
        if seconds is None or seconds <= 0:
            return
        if (tokens := _number(logs, "input_tokens")) is not None:
            logs["tok_per_sec"] = tokens / seconds
        self._add_share(logs, "mfu", "flos", seconds)
        self._add_share(logs, "hfu", "hardware_flos", seconds)

    def _add_share(self, logs: MutableMapping[str, object], share: str, count: str, seconds: float) -> None:
        if (flops := _number(logs, count)) is not None:
            peak = self.peak_hardware_flops or _number(logs, "peak_flops")
            logs[share] = model_flops_utilization(flops, seconds, peak)


def _number(logs: Mapping[str, object], key: str) -> float | None:
    value = logs.get(key)
    return value if isinstance(value, int | float) else None
