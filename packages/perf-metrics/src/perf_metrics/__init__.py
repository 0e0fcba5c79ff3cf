"""Tokens per second, model FLOPs and utilization for any training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .callbacks.device_metrics import OFUMetrics, PeakMemory
    from .callbacks.goodput_logger import GoodputLogger
    from .callbacks.lightning import LightningCallbacks
    from .callbacks.lightning_state import TokenCounts
    from .callbacks.loggers import JsonLogger, ProgressCallback
    from .callbacks.metrics import DefaultMetrics, IntervalCounts
    from .callbacks.prometheus_exporter import PrometheusExporter
    from .display import ColumnOverride, ColumnSpec, format_value
    from .fleet.app_metrics import Application, mfu_from_series, read_applications
    from .fleet.collect import collect_fleet
    from .fleet.gpu_health import GPUHealth
    from .fleet.health_samples import collect_gpu_health
    from .fleet.job_identity import JobIdentity, JobNames, read_pod_labels, read_sacct
    from .fleet.job_samples import FleetSamples
    from .fleet.ledger import collect_unallocated
    from .fleet.prometheus_api import PrometheusAPI, PrometheusError
    from .fleet.report import (
        FleetReport,
        JobReport,
        OutlierRule,
        fleet_report,
    )
    from .fleet.report_html import report_as_html
    from .fleet.report_json import report_as_json
    from .fleet.report_text import report_as_text
    from .flops.architecture import (
        CONVENTIONS,
        Architecture,
        Convention,
        FlopsPart,
        FlopsPerToken,
        FlopsUnknownError,
        WeightGroup,
        convention,
        hardware_flops_per_token,
    )
    from .flops.attention import AttentionLayer, ScanLayer
    from .flops.counting import CountedFlops, CountedPart, count_flops
    from .flops.per_token import (
        ComparedPart,
        FlopsComparison,
        ModelFlops,
        compare_flops,
        flops_per_token_breakdown,
        model_flops_per_token,
        palm_flops_per_token,
        warn_of_disagreement,
    )
    from .flops.read_architecture import architecture_of_config, architecture_of_model
    from .logs.compare import Comparison, compare_logs
    from .logs.goodput import (
        GOODPUT_FOLDER,
        Goodput,
        Session,
        goodput_as_json,
        goodput_as_text,
        plot_goodput,
        read_goodput,
    )
    from .logs.log_file import load_logs
    from .logs.plot import plot_logs
    from .logs.summary import RunSummary, summarize_log
    from .monitoring.dashboard import grafana_dashboard
    from .monitoring.rules import recording_and_alert_rules
    from .ofu.calibration import GemmCalibration, calibrate_gemm
    from .ofu.counter_files import read_dmon, read_exporter, read_nsys
    from .ofu.cycles import CycleScale, activity_from_cycles, cycle_scale
    from .ofu.diagnosis import Candidate, Diagnosis, JobFacts, diagnose
    from .ofu.kernels import (
        EffectiveSizes,
        GemmKernel,
        TileShape,
        adjusted_ofu,
        effective_sizes,
        explain,
        parse_kernel,
        tile_overhead,
    )
    from .ofu.nvml import CycleCounts
    from .ofu.process_checks import Finding, check_process
    from .ofu.sampler import DeviceWindow, OFUSampler, OFUWindow
    from .ofu.samples import (
        Device,
        MeanOFU,
        Readings,
        Sample,
        TensorClock,
        mean_ofu,
        mean_ofu_by_device,
        mean_ofu_by_job,
        ofu_from_activity,
        ofu_from_cycles,
        tensor_clock,
    )
    from .ofu.trace import TraceOverhead, trace_overhead
    from .throughput import Lap, ThroughputMeter, exclude_compilation
    from .traces.losses import Loss, largest_loss, losses_of
    from .traces.picture import plot_breakdown
    from .traces.ranks import CommunicationTime, RankBreakdown, Straggler, TraceBreakdown, read_breakdown
    from .traces.report import breakdown_as_json, breakdown_as_text
    from .traces.steps import RankSteps, StepBreakdown, read_steps
    from .traces.trace_file import TraceFileError
    from .uncertainty import (
        MeanInterval,
        independent_difference,
        mean_interval,
        paired_difference,
        shortest_window,
    )
    from .utilization import (
        MEASURED,
        MFUMeter,
        device_peak_flops,
        measure_peak_flops,
        mixed_peak_flops,
        model_flops_utilization,
        sum_peaks,
    )

__all__ = [
    "Application",
    "Architecture",
    "AttentionLayer",
    "CONVENTIONS",
    "Candidate",
    "ColumnOverride",
    "ColumnSpec",
    "CommunicationTime",
    "ComparedPart",
    "Comparison",
    "Convention",
    "CountedFlops",
    "CountedPart",
    "CycleCounts",
    "CycleScale",
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
    "GemmCalibration",
    "GemmKernel",
    "GOODPUT_FOLDER",
    "GPUHealth",
    "Goodput",
    "GoodputLogger",
    "IntervalCounts",
    "JobFacts",
    "JobIdentity",
    "JobNames",
    "JobReport",
    "JsonLogger",
    "Lap",
    "LightningCallbacks",
    "MEASURED",
    "Loss",
    "MFUMeter",
    "MeanInterval",
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
    "RankBreakdown",
    "RankSteps",
    "Readings",
    "RunSummary",
    "Sample",
    "ScanLayer",
    "Session",
    "StepBreakdown",
    "Straggler",
    "TensorClock",
    "ThroughputMeter",
    "TileShape",
    "TokenCounts",
    "TraceBreakdown",
    "TraceFileError",
    "TraceOverhead",
    "WeightGroup",
    "activity_from_cycles",
    "adjusted_ofu",
    "architecture_of_config",
    "architecture_of_model",
    "breakdown_as_json",
    "breakdown_as_text",
    "calibrate_gemm",
    "check_process",
    "collect_fleet",
    "collect_gpu_health",
    "collect_unallocated",
    "compare_flops",
    "compare_logs",
    "convention",
    "count_flops",
    "cycle_scale",
    "device_peak_flops",
    "diagnose",
    "effective_sizes",
    "exclude_compilation",
    "explain",
    "fleet_report",
    "flops_per_token_breakdown",
    "format_value",
    "goodput_as_json",
    "goodput_as_text",
    "grafana_dashboard",
    "hardware_flops_per_token",
    "largest_loss",
    "load_logs",
    "losses_of",
    "independent_difference",
    "mean_interval",
    "mean_ofu",
    "mean_ofu_by_device",
    "mean_ofu_by_job",
    "measure_peak_flops",
    "mfu_from_series",
    "mixed_peak_flops",
    "model_flops_per_token",
    "model_flops_utilization",
    "ofu_from_activity",
    "ofu_from_cycles",
    "paired_difference",
    "palm_flops_per_token",
    "parse_kernel",
    "plot_goodput",
    "plot_breakdown",
    "plot_logs",
    "read_applications",
    "read_breakdown",
    "read_dmon",
    "read_exporter",
    "read_goodput",
    "read_nsys",
    "read_steps",
    "read_pod_labels",
    "read_sacct",
    "recording_and_alert_rules",
    "report_as_html",
    "report_as_json",
    "report_as_text",
    "shortest_window",
    "sum_peaks",
    "summarize_log",
    "tensor_clock",
    "tile_overhead",
    "trace_overhead",
    "warn_of_disagreement",
]

# A name loads its module when it is first used: help texts and reports of logs need few of them.
_NAMES = {
    "callbacks.device_metrics": ("OFUMetrics", "PeakMemory"),
    "callbacks.goodput_logger": ("GoodputLogger",),
    "callbacks.lightning": ("LightningCallbacks",),
    "callbacks.lightning_state": ("TokenCounts",),
    "callbacks.loggers": ("JsonLogger", "ProgressCallback"),
    "callbacks.metrics": ("DefaultMetrics", "IntervalCounts"),
    "callbacks.prometheus_exporter": ("PrometheusExporter",),
    "display": ("ColumnOverride", "ColumnSpec", "format_value"),
    "fleet.app_metrics": ("Application", "mfu_from_series", "read_applications"),
    "fleet.collect": ("collect_fleet",),
    "fleet.gpu_health": ("GPUHealth",),
    "fleet.health_samples": ("collect_gpu_health",),
    "fleet.job_identity": ("JobIdentity", "JobNames", "read_pod_labels", "read_sacct"),
    "fleet.job_samples": ("FleetSamples",),
    "fleet.ledger": ("collect_unallocated",),
    "fleet.prometheus_api": ("PrometheusAPI", "PrometheusError"),
    "fleet.report": (
        "FleetReport",
        "JobReport",
        "OutlierRule",
        "fleet_report",
    ),
    "fleet.report_html": ("report_as_html",),
    "fleet.report_json": ("report_as_json",),
    "fleet.report_text": ("report_as_text",),
    "flops.architecture": (
        "Architecture",
        "CONVENTIONS",
        "Convention",
        "FlopsPart",
        "FlopsPerToken",
        "FlopsUnknownError",
        "WeightGroup",
        "convention",
        "hardware_flops_per_token",
    ),
    "flops.attention": ("AttentionLayer", "ScanLayer"),
    "flops.counting": ("CountedFlops", "CountedPart", "count_flops"),
    "flops.per_token": (
        "ComparedPart",
        "FlopsComparison",
        "ModelFlops",
        "compare_flops",
        "flops_per_token_breakdown",
        "model_flops_per_token",
        "palm_flops_per_token",
        "warn_of_disagreement",
    ),
    "flops.read_architecture": ("architecture_of_config", "architecture_of_model"),
    "logs.goodput": (
        "GOODPUT_FOLDER",
        "Goodput",
        "Session",
        "goodput_as_json",
        "goodput_as_text",
        "plot_goodput",
        "read_goodput",
    ),
    "logs.compare": ("Comparison", "compare_logs"),
    "logs.log_file": ("load_logs",),
    "logs.plot": ("plot_logs",),
    "logs.summary": ("RunSummary", "summarize_log"),
    "monitoring.dashboard": ("grafana_dashboard",),
    "monitoring.rules": ("recording_and_alert_rules",),
    "ofu.calibration": ("GemmCalibration", "calibrate_gemm"),
    "ofu.counter_files": ("read_dmon", "read_exporter", "read_nsys"),
    "ofu.cycles": ("CycleScale", "activity_from_cycles", "cycle_scale"),
    "ofu.diagnosis": ("Candidate", "Diagnosis", "JobFacts", "diagnose"),
    "ofu.kernels": (
        "EffectiveSizes",
        "GemmKernel",
        "TileShape",
        "adjusted_ofu",
        "effective_sizes",
        "explain",
        "parse_kernel",
        "tile_overhead",
    ),
    "ofu.nvml": ("CycleCounts",),
    "ofu.process_checks": ("Finding", "check_process"),
    "ofu.sampler": ("DeviceWindow", "OFUSampler", "OFUWindow"),
    "ofu.samples": (
        "Device",
        "MeanOFU",
        "Readings",
        "Sample",
        "TensorClock",
        "mean_ofu",
        "mean_ofu_by_device",
        "mean_ofu_by_job",
        "ofu_from_activity",
        "ofu_from_cycles",
        "tensor_clock",
    ),
    "ofu.trace": ("TraceOverhead", "trace_overhead"),
    "throughput": ("Lap", "ThroughputMeter", "exclude_compilation"),
    "traces.losses": ("Loss", "largest_loss", "losses_of"),
    "traces.picture": ("plot_breakdown",),
    "traces.ranks": ("CommunicationTime", "RankBreakdown", "Straggler", "TraceBreakdown", "read_breakdown"),
    "traces.report": ("breakdown_as_json", "breakdown_as_text"),
    "traces.steps": ("RankSteps", "StepBreakdown", "read_steps"),
    "traces.trace_file": ("TraceFileError",),
    "uncertainty": (
        "MeanInterval",
        "independent_difference",
        "mean_interval",
        "paired_difference",
        "shortest_window",
    ),
    "utilization": (
        "MEASURED",
        "MFUMeter",
        "device_peak_flops",
        "measure_peak_flops",
        "mixed_peak_flops",
        "model_flops_utilization",
        "sum_peaks",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
