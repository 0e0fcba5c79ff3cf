"""Tokens per second, model FLOPs and utilization for any training loop."""

from .callbacks.batch_counts import TokenCounts
from .callbacks.default_metrics import DefaultMetrics
from .callbacks.interval_counts import IntervalCounts
from .callbacks.json_logger import JsonLogger
from .callbacks.lightning import LightningCallbacks
from .callbacks.peak_memory import PeakMemory
from .callbacks.progress import ProgressCallback
from .compile_time import exclude_compilation
from .display.columns import ColumnOverride, ColumnSpec
from .display.format import format_value
from .flops.accounts import FlopsPart, FlopsPerToken, FlopsUnknownError
from .flops.architecture import Architecture, WeightGroup
from .flops.attention import AttentionLayer, ScanLayer
from .flops.comparison import ComparedPart, FlopsComparison, compare_flops, warn_of_disagreement
from .flops.conventions import CONVENTIONS, Convention, convention
from .flops.counting import CountedFlops, CountedPart, count_flops
from .flops.from_config import architecture_of_config
from .flops.from_modules import architecture_of_model
from .flops.per_token import (
    ModelFlops,
    flops_per_token_breakdown,
    model_flops_per_token,
    palm_flops_per_token,
)
from .flops.recomputation import hardware_flops_per_token
from .logs.log_file import load_logs
from .logs.plot import plot_logs
from .logs.summary import RunSummary, summarize_log
from .throughput import Lap, ThroughputMeter
from .utilization import device_peak_flops, mixed_peak_flops, model_flops_utilization, sum_peaks

__all__ = [
    "Architecture",
    "AttentionLayer",
    "CONVENTIONS",
    "ColumnOverride",
    "ColumnSpec",
    "ComparedPart",
    "Convention",
    "CountedFlops",
    "CountedPart",
    "DefaultMetrics",
    "FlopsComparison",
    "FlopsPart",
    "FlopsPerToken",
    "FlopsUnknownError",
    "IntervalCounts",
    "JsonLogger",
    "Lap",
    "LightningCallbacks",
    "ModelFlops",
    "PeakMemory",
    "ProgressCallback",
    "RunSummary",
    "ScanLayer",
    "ThroughputMeter",
    "TokenCounts",
    "WeightGroup",
    "architecture_of_config",
    "architecture_of_model",
    "compare_flops",
    "convention",
    "count_flops",
    "device_peak_flops",
    "exclude_compilation",
    "flops_per_token_breakdown",
    "format_value",
    "hardware_flops_per_token",
    "load_logs",
    "mixed_peak_flops",
    "model_flops_per_token",
    "model_flops_utilization",
    "palm_flops_per_token",
    "plot_logs",
    "sum_peaks",
    "summarize_log",
    "warn_of_disagreement",
]
