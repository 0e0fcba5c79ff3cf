"""Data-parallel training with the single-process loss curve, or with a fraction of the communication."""

from typing import TYPE_CHECKING

from .arguments import (
    CompressionArguments,
    DDPArguments,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
)

if TYPE_CHECKING:
    from .replicate import DDPTrainer, Replicate

__all__ = [
    "CompressionArguments",
    "DDPArguments",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DiLoCoArguments",
    "PostLocalSGDArguments",
    "Replicate",
]

# A name loads its module when it is first used: the arguments need no torch.
_MODULES = {
    "Replicate": ".replicate",
    "DDPTrainer": ".replicate",
}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            replaced = ". Use Replicate, as Trainer(args, parallel=[Replicate()])." * (
                name == "DDPParallelism"
            )
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{replaced}")
        value: object = getattr(import_module(_MODULES[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
