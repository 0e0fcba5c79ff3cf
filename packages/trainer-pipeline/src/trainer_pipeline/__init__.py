"""Training with the layers of a model divided among the ranks."""

from trainer_core import Plan as PipelinePlan
from trainer_core import RankMemory as StageMemory

from .arguments import PipelineArguments, PipelineTrainingArguments
from .planning import plan
from .splitting import BlockSplitter, ModelSplitter
from .trainer import PipelineTrainer
from .transform import PipelineStages

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
    """Say what has replaced a name of an earlier version."""
    if name == "PipelineParallelism":
        raise AttributeError(
            "trainer_pipeline.PipelineParallelism was removed: use "
            "Trainer(args, parallel=[PipelineStages()]), which combines with other transforms"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
