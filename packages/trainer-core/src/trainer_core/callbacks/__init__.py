"""Callbacks that come with the trainer."""

from .external_control import ExternalControl
from .gradient_stats import GradientStatistics
from .info import InfoCallback
from .profiling import MemorySnapshotCallback, ProfilerCallback, dump_on_oom
from .stopping import DivergenceDetector, EarlyStopping
from .text_samples import TextSamples
from .tracker import Tracker
from .trackers import MLflowCallback, TensorBoardCallback, WandbCallback

__all__ = [
    "DivergenceDetector",
    "EarlyStopping",
    "ExternalControl",
    "GradientStatistics",
    "InfoCallback",
    "MLflowCallback",
    "MemorySnapshotCallback",
    "ProfilerCallback",
    "TensorBoardCallback",
    "TextSamples",
    "Tracker",
    "WandbCallback",
    "dump_on_oom",
]
