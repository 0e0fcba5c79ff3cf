"""Training with weights, gradients and optimizer state sharded over the ranks."""

from trainer_core import Plan as MemoryPlan

from .arguments import FSDP2Arguments, FSDP2TrainingArguments
from .full_sharding import FullyShard
from .planning import Recommendation, Rejected, plan, recommend
from .trainer import FSDP2Trainer

__all__ = [
    "FSDP2Arguments",
    "FullyShard",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "MemoryPlan",
    "Recommendation",
    "Rejected",
    "plan",
    "recommend",
]

_REPLACED = {
    "FSDP2Parallelism": "FullyShard, as Trainer(args, parallel=[FullyShard()])",
    "Mesh": "dist_env.ParallelLayout, as ParallelLayout(shard=8, replicate=2)",
}


def __getattr__(name: str) -> object:
    """Say what has replaced a name of an earlier version."""
    replaced = f"; use {_REPLACED[name]}" if name in _REPLACED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{replaced}")
