"""Training with the layers of a model spread over the ranks, and the curve of one process."""

from .arguments import PipelineArguments, PipelineTrainingArguments
from .parallelism import PipelineParallelism
from .splitting import BlockSplitter, ModelSplitter
from .trainer import PipelineTrainer

__all__ = [
    "BlockSplitter",
    "ModelSplitter",
    "PipelineArguments",
    "PipelineParallelism",
    "PipelineTrainer",
    "PipelineTrainingArguments",
]
