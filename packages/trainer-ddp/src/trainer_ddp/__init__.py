"""Data-parallel training with the single-process loss curve, or with a fraction of the communication."""

from .arguments import (
    CompressionArguments,
    DDPArguments,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
)
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


def __getattr__(name: str) -> object:
    """Say what has replaced a name of an earlier version."""
    replaced = "; use Replicate, as Trainer(args, parallel=[Replicate()])" if name == "DDPParallelism" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{replaced}")
