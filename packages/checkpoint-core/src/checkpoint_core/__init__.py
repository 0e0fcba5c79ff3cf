"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

from checkpoint_core.components import (
    SharingPattern,
    StateComponent,
    Stateful,
    StatefulProvider,
    StaticStatefulProvider,
)
from checkpoint_core.discovery import find_latest_checkpoint
from checkpoint_core.errors import CheckpointError
from checkpoint_core.hf_layout import load_model_weights
from checkpoint_core.loading import LoadedCheckpoint
from checkpoint_core.manager import CheckpointConfig, CheckpointManager
from checkpoint_core.optimizer import OptimizerState
from checkpoint_core.rng import RNGState
from checkpoint_core.saving import Preprocessor
from checkpoint_core.weights import ModelState

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "LoadedCheckpoint",
    "ModelState",
    "OptimizerState",
    "Preprocessor",
    "RNGState",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "StatefulProvider",
    "StaticStatefulProvider",
    "find_latest_checkpoint",
    "load_model_weights",
]
