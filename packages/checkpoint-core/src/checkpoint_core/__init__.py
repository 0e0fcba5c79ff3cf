"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoint_core.components import (
        Reshardable,
        SharingPattern,
        StateComponent,
        Stateful,
        StatefulProvider,
        StaticStatefulProvider,
    )
    from checkpoint_core.config import CheckpointConfig
    from checkpoint_core.directory.lease import (
        DirectoryLease,
        LeaseHeldError,
        LeaseHolder,
        find_lease_holder,
    )
    from checkpoint_core.directory.retention import BestCheckpoint
    from checkpoint_core.directory.select import find_latest_checkpoint
    from checkpoint_core.errors import CheckpointError, LeaseLostError, LostRankError
    from checkpoint_core.loading import LoadedCheckpoint, load_model_weights
    from checkpoint_core.manager import CheckpointManager
    from checkpoint_core.saving import Preprocessor
    from checkpoint_core.state.optimizer_rng import OptimizerState, RNGState
    from checkpoint_core.state.weights import ModelState
    from checkpoint_core.storage.tensors import local_ranges

__all__ = [
    "BestCheckpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "DirectoryLease",
    "LeaseHeldError",
    "LeaseHolder",
    "LeaseLostError",
    "LoadedCheckpoint",
    "LostRankError",
    "ModelState",
    "OptimizerState",
    "Preprocessor",
    "RNGState",
    "Reshardable",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "StatefulProvider",
    "StaticStatefulProvider",
    "find_latest_checkpoint",
    "find_lease_holder",
    "load_model_weights",
    "local_ranges",
]

# A name loads its module when it is first used: the help of the command needs no torch.
_NAMES = {
    "components": (
        "Reshardable",
        "SharingPattern",
        "StateComponent",
        "Stateful",
        "StatefulProvider",
        "StaticStatefulProvider",
    ),
    "config": ("CheckpointConfig",),
    "directory.lease": ("DirectoryLease", "LeaseHeldError", "LeaseHolder", "find_lease_holder"),
    "directory.retention": ("BestCheckpoint",),
    "directory.select": ("find_latest_checkpoint",),
    "errors": ("CheckpointError", "LeaseLostError", "LostRankError"),
    "loading": ("LoadedCheckpoint", "load_model_weights"),
    "manager": ("CheckpointManager",),
    "saving": ("Preprocessor",),
    "state.optimizer_rng": ("OptimizerState", "RNGState"),
    "state.weights": ("ModelState",),
    "storage.tensors": ("local_ranges",),
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
