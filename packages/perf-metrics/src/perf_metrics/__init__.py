"""Tokens per second, model FLOPs and utilization for any training loop."""

from .columns import ColumnOverride, ColumnSpec
from .flops import (
    FlopsPerToken,
    FlopsUnknownError,
    flops_per_token_breakdown,
    model_flops_per_token,
    palm_flops_per_token,
)
from .format import format_value
from .json_logger import JsonLogger
from .log_file import load_logs
from .metrics_callback import DefaultMetrics
from .plot import plot_logs
from .progress import ProgressCallback
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
