"""Data-parallel training with the curve of one process, or with a fraction of the communication."""

from .arguments import (
    CompressionArguments,
    DDPArguments,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
)
from .parallelism import DDPParallelism
from .trainer import DDPTrainer

__all__ = [
    "CompressionArguments",
    "DDPArguments",
    "DDPParallelism",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DiLoCoArguments",
    "PostLocalSGDArguments",
]
