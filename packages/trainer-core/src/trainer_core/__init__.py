"""A training loop that is small to read, exact in its numbers and resumable anywhere."""

from .arguments import BaseTrainingArguments, MinimalTrainingArguments, TrainingArguments
from .batch import Batch
from .config import arguments_from_dict, field_docs, load_config_file, suggest
from .errors import ConfigurationError, DataError
from .events import EVENTS
from .loss import CausalLMLoss, MeanLoss, TokenLoss
from .parallelism import Parallelism, SingleDevice
from .state import StopCause, TrainerControl, TrainerState, TrainOutput
from .trainer import Trainer

__all__ = [
    "EVENTS",
    "BaseTrainingArguments",
    "Batch",
    "CausalLMLoss",
    "ConfigurationError",
    "DataError",
    "MeanLoss",
    "MinimalTrainingArguments",
    "Parallelism",
    "SingleDevice",
    "StopCause",
    "TokenLoss",
    "TrainOutput",
    "Trainer",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "arguments_from_dict",
    "field_docs",
    "load_config_file",
    "suggest",
]
