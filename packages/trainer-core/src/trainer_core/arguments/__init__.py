"""What a run can be told: the tree of argument classes, frozen and checked when made."""

from .base import BaseTrainingArguments
from .data_parallel import DataParallelArguments
from .minimal import MinimalTrainingArguments
from .training import TrainingArguments

__all__ = ["BaseTrainingArguments", "DataParallelArguments", "MinimalTrainingArguments", "TrainingArguments"]
