"""Tokens per second, model FLOPs and utilization for any training loop."""

from .callbacks.default_metrics import DefaultMetrics
from .callbacks.json_logger import JsonLogger
from .callbacks.progress import ProgressCallback
from .display.columns import ColumnOverride, ColumnSpec
from .display.format import format_value
from .flops.per_token import (
    FlopsPerToken,
    FlopsUnknownError,
    flops_per_token_breakdown,
    model_flops_per_token,
    palm_flops_per_token,
)
from .logs.log_file import load_logs
from .logs.plot import plot_logs
from .throughput import Lap, ThroughputMeter
from .utilization import device_peak_flops, model_flops_utilization

__all__ = [
    "ColumnOverride",
    "ColumnSpec",
    "DefaultMetrics",
    "FlopsPerToken",
    "FlopsUnknownError",
    "JsonLogger",
    "Lap",
    "ProgressCallback",
    "ThroughputMeter",
    "device_peak_flops",
    "flops_per_token_breakdown",
    "format_value",
    "load_logs",
    "model_flops_per_token",
    "model_flops_utilization",
    "palm_flops_per_token",
    "plot_logs",
]
