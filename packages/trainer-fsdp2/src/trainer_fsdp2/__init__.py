"""Training with weights, gradients and optimizer state sharded over the ranks."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

from .arguments import FSDP2Arguments, FSDP2TrainingArguments

if TYPE_CHECKING:
    from trainer_core import Plan as MemoryPlan

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

_HINTS = {
    "FSDP2Parallelism": "Use FullyShard, as Trainer(args, parallel=[FullyShard()]).",
    "Mesh": "Use dist_env.ParallelLayout, as ParallelLayout(shard=8, replicate=2).",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HINTS)
