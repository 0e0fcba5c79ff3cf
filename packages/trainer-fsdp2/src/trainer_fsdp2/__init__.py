"""Training with weights, gradients and optimizer state sharded over the ranks."""

from typing import TYPE_CHECKING

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

_REPLACED = {
    "FSDP2Parallelism": "FullyShard, as Trainer(args, parallel=[FullyShard()])",
    "Mesh": "dist_env.ParallelLayout, as ParallelLayout(shard=8, replicate=2)",
}

# A name loads its module when it is first used: the arguments need no torch.
_MODULES = {
    "MemoryPlan": ("trainer_core", "Plan"),
    "FullyShard": (".full_sharding", "FullyShard"),
    "Recommendation": (".planning", "Recommendation"),
    "Rejected": (".planning", "Rejected"),
    "plan": (".planning", "plan"),
    "recommend": (".planning", "recommend"),
    "FSDP2Trainer": (".trainer", "FSDP2Trainer"),
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            replaced = f". Use {_REPLACED[name]}." if name in _REPLACED else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{replaced}")
        module, own_name = _MODULES[name]
        value: object = getattr(import_module(module, __name__), own_name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
