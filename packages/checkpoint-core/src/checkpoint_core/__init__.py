"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

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
