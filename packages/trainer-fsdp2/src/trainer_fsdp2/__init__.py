"""Training with model, gradients and optimizer spread over the ranks, and the curve of one process."""

from importlib import import_module
from typing import TYPE_CHECKING

from .arguments import FSDP2Arguments, FSDP2TrainingArguments
from .full_sharding import FullyShard
from .trainer import FSDP2Trainer

if TYPE_CHECKING:
    from .planning import MemoryPlan, Mesh, Recommendation, Rejected, plan, recommend

__all__ = [
    "FSDP2Arguments",
    "FullyShard",
    "FSDP2Trainer",
    "FSDP2TrainingArguments",
    "MemoryPlan",
    "Mesh",
    "Recommendation",
    "Rejected",
    "plan",
    "recommend",
]


def __getattr__(name: str) -> object:
    """Import the planner when it is first used: what it needs of torch takes seconds to import."""
    if name not in __all__:
        replaced = "; use FullyShard, as Trainer(args, parallel=[FullyShard()])"
        told = replaced if name == "FSDP2Parallelism" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")
    value: object = getattr(import_module(".planning", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
