"""What a run can be told: the tree of argument classes, frozen and checked when made."""

from .base import BaseTrainingArguments
from .minimal import MinimalTrainingArguments, run_path
from .training import DataParallelArguments, TrainingArguments

__all__ = [
    "BaseTrainingArguments",
    "DataParallelArguments",
    "MinimalTrainingArguments",
    "TrainingArguments",
    "run_path",
]
