"""The callback that adds derived figures to each log record, before anything shows or stores it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from ..utilization import check_peak, model_flops_utilization


class DefaultMetrics:
    """Adds `tok_per_sec`, `mfu` and `peak_mem` to the log record.

    | added | from | absent when |
    |---|---|---|
    | `tok_per_sec` | `input_tokens` / `interval_seconds` | either is missing |
    | `mfu` | `flos` / (`interval_seconds` x peak); None if the peak is unknown | FLOPs or time are missing |
    | `peak_mem` | `peak_mem_allocated`, bytes per rank | there is no accelerator |

    `interval_seconds` is net wall time: it contains data loading and the optimizer, and leaves out evaluation
    and saving. Put this callback before those that show or store records.

    Args:
        peak_hardware_flops: Peak FLOP/s summed over every device of the job, for the type that the matrix
            multiplications run in. None: unknown.

    Raises:
        ValueError: `peak_hardware_flops` is not a positive finite number.
    """

    def __init__(self, peak_hardware_flops: float | None = None) -> None:
        if peak_hardware_flops is not None:
            check_peak("peak_hardware_flops", peak_hardware_flops)
        self.peak_hardware_flops = peak_hardware_flops

    def on_log_step(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the derived entries to `logs`."""
        seconds = _number(logs, "interval_seconds")
        tokens = _number(logs, "input_tokens")
        flops = _number(logs, "flos")
        if seconds is not None and seconds > 0:
            if tokens is not None:
                logs["tok_per_sec"] = tokens / seconds
            if flops is not None:
                logs["mfu"] = model_flops_utilization(flops, seconds, self.peak_hardware_flops)
        if "peak_mem_allocated" in logs:
            logs["peak_mem"] = logs["peak_mem_allocated"]


def _number(logs: Mapping[str, object], key: str) -> float | None:
    value = logs.get(key)
    return value if isinstance(value, int | float) else None
