"""Training with the layers of a model divided among the ranks."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

from .arguments import PipelineArguments, PipelineTrainingArguments

if TYPE_CHECKING:
    from trainer_core import Plan as PipelinePlan
    from trainer_core import RankMemory as StageMemory

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

_HINTS = {
    "PipelineParallelism": "Use Trainer(args, parallel=[PipelineStages()]), which combines with others."
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HINTS)
