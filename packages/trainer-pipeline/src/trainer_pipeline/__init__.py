"""Training with the layers of a model spread over the ranks, and the curve of one process."""

from importlib import import_module
from typing import TYPE_CHECKING

from .arguments import PipelineArguments, PipelineTrainingArguments
from .splitting import BlockSplitter, ModelSplitter
from .trainer import PipelineTrainer
from .transform import PipelineStages

if TYPE_CHECKING:
    from .planning import PipelinePlan, StageMemory, plan

__all__ = [
    "BlockSplitter",
    "ModelSplitter",
    "PipelineArguments",
    "PipelinePlan",
    "PipelineStages",
    "PipelineTrainer",
    "PipelineTrainingArguments",
    "StageMemory",
    "plan",
]


def __getattr__(name: str) -> object:
    """Import the planner when it is first used: training does not need it."""
    if name == "PipelineParallelism":
        raise AttributeError(
            "trainer_pipeline.PipelineParallelism was removed: use "
            "Trainer(args, parallel=[PipelineStages()]), which combines with other transforms"
        )
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(".planning", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
