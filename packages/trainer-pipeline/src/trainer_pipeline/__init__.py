"""Training with the layers of a model divided among the ranks."""

from typing import TYPE_CHECKING

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

# A name loads its module when it is first used: the arguments need no torch.
_MODULES = {
    "PipelinePlan": ("trainer_core", "Plan"),
    "StageMemory": ("trainer_core", "RankMemory"),
    "plan": (".planning", "plan"),
    "BlockSplitter": (".splitting", "BlockSplitter"),
    "ModelSplitter": (".splitting", "ModelSplitter"),
    "PipelineTrainer": (".trainer", "PipelineTrainer"),
    "PipelineStages": (".transform", "PipelineStages"),
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            if name == "PipelineParallelism":
                raise AttributeError(
                    "trainer_pipeline.PipelineParallelism was removed. Use Trainer(args, "
                    "parallel=[PipelineStages()]), which combines with other transforms."
                )
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, own_name = _MODULES[name]
        value: object = getattr(import_module(module, __name__), own_name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
