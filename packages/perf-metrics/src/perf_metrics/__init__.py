"""Tokens per second, model FLOPs and utilization for any training loop."""

from .callbacks.batch_counts import TokenCounts
from .callbacks.default_metrics import DefaultMetrics
from .callbacks.interval_counts import IntervalCounts
from .callbacks.json_logger import JsonLogger
from .callbacks.lightning import LightningCallbacks
from .callbacks.ofu_metrics import OFUMetrics
from .callbacks.peak_memory import PeakMemory
from .callbacks.progress import ProgressCallback
from .callbacks.prometheus_exporter import PrometheusExporter
from .compile_time import exclude_compilation
from .display.columns import ColumnOverride, ColumnSpec
from .display.format import format_value
from .fleet.applications import Application, read_applications
from .fleet.collect import collect_fleet
from .fleet.job_samples import FleetSamples
from .fleet.mfu_series import mfu_from_series
from .fleet.prometheus_api import PrometheusAPI, PrometheusError
from .fleet.report import FleetReport, JobReport, OutlierRule, fleet_report
from .fleet.report_html import report_as_html
from .fleet.report_json import report_as_json
from .fleet.report_text import report_as_text
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
from .monitoring.dashboard import grafana_dashboard
from .monitoring.rules import recording_and_alert_rules
from .ofu.clocks import TensorClock, ofu_from_activity, ofu_from_cycles, tensor_clock
from .ofu.dcgm_dmon import read_dmon
from .ofu.dcgm_exporter import read_exporter
from .ofu.diagnosis import Candidate, Diagnosis, diagnose
from .ofu.gpm import CycleCounts
from .ofu.job_facts import JobFacts
from .ofu.kernel_names import GemmKernel, TileShape, explain, parse_kernel
from .ofu.nsys import read_nsys
from .ofu.process_checks import Finding, check_process
from .ofu.sampler import OFUSampler
from .ofu.samples import Device, MeanOFU, Readings, Sample, mean_ofu, mean_ofu_by_device, mean_ofu_by_job
from .ofu.tiles import EffectiveSizes, adjusted_ofu, effective_sizes, tile_overhead
from .ofu.trace import TraceOverhead, trace_overhead
from .ofu.trace_events import TraceFileError
from .ofu.windows import DeviceWindow, OFUWindow
from .throughput import Lap, ThroughputMeter
from .utilization import device_peak_flops, mixed_peak_flops, model_flops_utilization, sum_peaks

__all__ = [
    "Application",
    "Architecture",
    "AttentionLayer",
    "CONVENTIONS",
    "Candidate",
    "ColumnOverride",
    "ColumnSpec",
    "ComparedPart",
    "Convention",
    "CountedFlops",
    "CountedPart",
    "CycleCounts",
    "DefaultMetrics",
    "Device",
    "DeviceWindow",
    "Diagnosis",
    "EffectiveSizes",
    "Finding",
    "FleetReport",
    "FleetSamples",
    "FlopsComparison",
    "FlopsPart",
    "FlopsPerToken",
    "FlopsUnknownError",
    "GemmKernel",
    "IntervalCounts",
    "JobFacts",
    "JobReport",
    "JsonLogger",
    "Lap",
    "LightningCallbacks",
    "MeanOFU",
    "ModelFlops",
    "OFUMetrics",
    "OFUSampler",
    "OFUWindow",
    "OutlierRule",
    "PeakMemory",
    "ProgressCallback",
    "PrometheusAPI",
    "PrometheusError",
    "PrometheusExporter",
    "Readings",
    "RunSummary",
    "Sample",
    "ScanLayer",
    "TensorClock",
    "ThroughputMeter",
    "TileShape",
    "TokenCounts",
    "TraceFileError",
    "TraceOverhead",
    "WeightGroup",
    "adjusted_ofu",
    "architecture_of_config",
    "architecture_of_model",
    "check_process",
    "collect_fleet",
    "compare_flops",
    "convention",
    "count_flops",
    "device_peak_flops",
    "diagnose",
    "effective_sizes",
    "exclude_compilation",
    "explain",
    "fleet_report",
    "flops_per_token_breakdown",
    "format_value",
    "grafana_dashboard",
    "hardware_flops_per_token",
    "load_logs",
    "mean_ofu",
    "mean_ofu_by_device",
    "mean_ofu_by_job",
    "mfu_from_series",
    "mixed_peak_flops",
    "model_flops_per_token",
    "model_flops_utilization",
    "ofu_from_activity",
    "ofu_from_cycles",
    "palm_flops_per_token",
    "parse_kernel",
    "plot_logs",
    "read_applications",
    "read_dmon",
    "read_exporter",
    "read_nsys",
    "recording_and_alert_rules",
    "report_as_html",
    "report_as_json",
    "report_as_text",
    "sum_peaks",
    "summarize_log",
    "tensor_clock",
    "tile_overhead",
    "trace_overhead",
    "warn_of_disagreement",
]
