"""One model computed by several devices: plans, tensor and sequence parallelism, and losses for them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_parallel.check import LayerShare, check_plan
    from model_parallel.loss import is_sharded_head, sharded_cross_entropy, sharded_linear_cross_entropy
    from model_parallel.plan import STYLES, PlanError, tensor_plan
    from model_parallel.shard import shard_tensors
    from model_parallel.styles import whole_sequences

__all__ = [
    "STYLES",
    "LayerShare",
    "PlanError",
    "check_plan",
    "is_sharded_head",
    "shard_tensors",
    "sharded_cross_entropy",
    "sharded_linear_cross_entropy",
    "tensor_plan",
    "whole_sequences",
]

# A name loads its module when it is first used: the help of the command needs no torch.
_NAMES = {
    "check": ("LayerShare", "check_plan"),
    "loss": ("is_sharded_head", "sharded_cross_entropy", "sharded_linear_cross_entropy"),
    "plan": ("STYLES", "PlanError", "tensor_plan"),
    "shard": ("shard_tensors",),
    "styles": ("whole_sequences",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker knows the names from above, and finds a misspelt one

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
