"""Callbacks that come with the trainer."""

from .divergence import DivergenceDetector
from .early_stopping import EarlyStopping
from .external_control import ExternalControl
from .gradient_stats import GradientStatistics
from .info import InfoCallback
from .memory_snapshot import MemorySnapshotCallback, dump_on_oom
from .mlflow import MLflowCallback
from .profiler import ProfilerCallback
from .tensorboard import TensorBoardCallback
from .text_samples import TextSamples
from .tracker import Tracker
from .wandb import WandbCallback

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
