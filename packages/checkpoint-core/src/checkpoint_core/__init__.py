"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

from typing import TYPE_CHECKING

from dist_env import lazy_names

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
    from checkpoint_core.memory_directory import LAUNCHER_VARIABLE, MemoryDirectory
    from checkpoint_core.model_directory import load_model_weights
    from checkpoint_core.model_state import ModelState, OptimizerState
    from checkpoint_core.retention import BestCheckpoint
    from checkpoint_core.saving import Preprocessor
    from checkpoint_core.selection import find_latest_checkpoint
    from dist_env import StoreError

__all__ = [
    "LAUNCHER_VARIABLE",
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
    "MemoryDirectory",
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
    "StoreError",
    "find_latest_checkpoint",
    "find_lease_holder",
    "load_model_weights",
    "local_ranges",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__)
