"""Data-parallel training with the single-process loss curve, or with a fraction of the communication."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

from .arguments import (
    CompressionArguments,
    DDPArguments,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
)

if TYPE_CHECKING:
    from .replicate import DDPTrainer, Replicate

__all__ = [
    "CompressionArguments",
    "DDPArguments",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DiLoCoArguments",
    "PostLocalSGDArguments",
    "Replicate",
]

_HINTS = {"DDPParallelism": "Use Replicate, as Trainer(args, parallel=[Replicate()])."}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HINTS)
