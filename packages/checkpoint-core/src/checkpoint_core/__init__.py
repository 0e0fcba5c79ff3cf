"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoint_core.components import (
        Reshardable,
        RNGState,
        SharingPattern,
        StateComponent,
        Stateful,
        StatefulProvider,
        StaticStatefulProvider,
    )
    from checkpoint_core.config import CheckpointConfig
    from checkpoint_core.encoding import local_ranges
    from checkpoint_core.errors import CheckpointError, LeaseLostError, LostRankError
    from checkpoint_core.lease import DirectoryLease, LeaseHeldError, LeaseHolder, find_lease_holder
    from checkpoint_core.lightning_io import LightningCheckpointIO
    from checkpoint_core.loading import LoadedCheckpoint
    from checkpoint_core.manager import CheckpointManager
    from checkpoint_core.model_directory import load_model_weights
    from checkpoint_core.model_state import ModelState, OptimizerState
    from checkpoint_core.saving import Preprocessor
    from checkpoint_core.selection import BestCheckpoint, find_latest_checkpoint

__all__ = [
    "BestCheckpoint",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "DirectoryLease",
    "LeaseHeldError",
    "LeaseHolder",
    "LeaseLostError",
    "LightningCheckpointIO",
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
        "RNGState",
        "SharingPattern",
        "StateComponent",
        "Stateful",
        "StatefulProvider",
        "StaticStatefulProvider",
    ),
    "config": ("CheckpointConfig",),
    "encoding": ("local_ranges",),
    "errors": ("CheckpointError", "LeaseLostError", "LostRankError"),
    "lease": ("DirectoryLease", "LeaseHeldError", "LeaseHolder", "find_lease_holder"),
    "lightning_io": ("LightningCheckpointIO",),
    "loading": ("LoadedCheckpoint",),
    "manager": ("CheckpointManager",),
    "model_directory": ("load_model_weights",),
    "model_state": ("ModelState", "OptimizerState"),
    "saving": ("Preprocessor",),
    "selection": ("BestCheckpoint", "find_latest_checkpoint"),
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
