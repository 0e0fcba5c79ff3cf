"""The callback that adds derived figures to each log record, before anything shows or stores it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping

from ..records import is_training
from ..utilization import check_peak, model_flops_utilization
from .events import EventHandlers

_logger = logging.getLogger("perf_metrics")
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
        for share, rate in (("mfu", "flops_per_second"), ("hfu", "hardware_flops_per_second")):
            if (flops := _number(logs, rate)) is not None:
                logs[share] = model_flops_utilization(flops, 1.0, self._peak(logs))
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
        tokens = _number(logs, "input_tokens")
        if tokens is not None:
            logs["tok_per_sec"] = tokens / seconds
        for share, count in (("mfu", "flos"), ("hfu", "hardware_flos")):
            flops = _number(logs, count)
            if flops is not None:
                logs[share] = model_flops_utilization(flops, seconds, self._peak(logs))

    def _peak(self, logs: Mapping[str, object]) -> float | None:
        return self.peak_hardware_flops or _number(logs, "peak_flops")


def _number(logs: Mapping[str, object], key: str) -> float | None:
    value = logs.get(key)
    return value if isinstance(value, int | float) else None
