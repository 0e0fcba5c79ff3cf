"""A training loop that is small to read, exact in its numbers and resumable anywhere."""

from .arguments import (
    BaseTrainingArguments,
    DataParallelArguments,
    MinimalTrainingArguments,
    TrainingArguments,
)
from .batch import Batch
from .callbacks import (
    DivergenceDetector,
    EarlyStopping,
    ExternalControl,
    GradientStatistics,
    InfoCallback,
    MemorySnapshotCallback,
    MLflowCallback,
    ProfilerCallback,
    TensorBoardCallback,
    TextSamples,
    Tracker,
    WandbCallback,
    dump_on_oom,
)
from .config import arguments_from_dict, field_docs, load_config_file, suggest
from .data_parallel import DataParallel
from .errors import ConfigurationError, DataError
from .evaluation import EvalMetric
from .events import EVENTS
from .loss import (
    CausalLMLoss,
    FusedLinearCrossEntropy,
    MeanLoss,
    ModelLoss,
    OutputMeanLoss,
    TokenLoss,
    count_next_tokens,
    loss_of,
)
from .model import (
    InitialValues,
    ModelInit,
    ModelSource,
    checkpoint_activations,
    construct_without_weights,
    convert_model,
    find_blocks,
    prepare_model,
)
from .optimization import Multiopt, NonFiniteGradientError, build_optimizer, clip_grad_norm
from .parallelism import Parallelism, Scored, SingleDevice
from .precision import (
    FP8_RECIPES,
    QAT_RECIPES,
    convert_qat,
    export_qat,
    export_qat_checkpoint,
    load_quantized,
    prepare_qat,
)
from .replicas import saved_buffers
from .state import StopCause, TrainerControl, TrainerState, TrainOutput
from .stop_requests import EXIT_RESUMABLE
from .traffic import Traffic
from .trainer import Trainer

__all__ = [
    "EVENTS",
    "EXIT_RESUMABLE",
    "FP8_RECIPES",
    "QAT_RECIPES",
    "BaseTrainingArguments",
    "Batch",
    "CausalLMLoss",
    "ConfigurationError",
    "DataError",
    "DataParallel",
    "DataParallelArguments",
    "DivergenceDetector",
    "EarlyStopping",
    "EvalMetric",
    "ExternalControl",
    "FusedLinearCrossEntropy",
    "GradientStatistics",
    "InfoCallback",
    "InitialValues",
    "MLflowCallback",
    "MeanLoss",
    "MemorySnapshotCallback",
    "MinimalTrainingArguments",
    "ModelInit",
    "ModelLoss",
    "ModelSource",
    "Multiopt",
    "NonFiniteGradientError",
    "OutputMeanLoss",
    "Parallelism",
    "ProfilerCallback",
    "Scored",
    "SingleDevice",
    "StopCause",
    "TensorBoardCallback",
    "TextSamples",
    "TokenLoss",
    "Tracker",
    "Traffic",
    "TrainOutput",
    "Trainer",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "WandbCallback",
    "arguments_from_dict",
    "build_optimizer",
    "checkpoint_activations",
    "clip_grad_norm",
    "construct_without_weights",
    "convert_model",
    "convert_qat",
    "count_next_tokens",
    "dump_on_oom",
    "export_qat",
    "export_qat_checkpoint",
    "field_docs",
    "find_blocks",
    "load_config_file",
    "load_quantized",
    "loss_of",
    "prepare_model",
    "prepare_qat",
    "saved_buffers",
    "suggest",
]
