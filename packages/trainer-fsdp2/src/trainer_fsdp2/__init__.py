"""Training with model, gradients and optimizer spread over the ranks, and the curve of one process."""

from .arguments import FSDP2Arguments, FSDP2TrainingArguments
from .parallelism import FSDP2Parallelism
from .planning import MemoryPlan, Mesh, Recommendation, Rejected, plan, recommend
from .trainer import FSDP2Trainer

__all__ = [
    "FSDP2Arguments",
    "FSDP2Parallelism",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "MemoryPlan",
    "Mesh",
    "Recommendation",
    "Rejected",
    "plan",
    "recommend",
]
