"""What is done to a model before it trains: construction, activation checkpointing, compilation."""

from .activation_checkpointing import blocks_to_checkpoint, checkpoint_activations
from .blocks import find_blocks
from .compilation import compile_model
from .construction import ModelInit, ModelSource, construct, construct_without_weights
from .deferred import InitialValues, construct_deferred
from .filling import fill_parameters, move_buffers
from .meta_construction import verify_initialised
from .preparation import convert_model, prepare_model
from .recompiles import RecompileCounter
from .run_settings import run_settings
from .sharding import add_up_gradients, fsdp_modules
from .without_values import has_no_values, ordinary_tensors, without_values

__all__ = [
    "InitialValues",
    "ModelInit",
    "ModelSource",
    "RecompileCounter",
    "add_up_gradients",
    "blocks_to_checkpoint",
    "checkpoint_activations",
    "compile_model",
    "construct",
    "construct_deferred",
    "construct_without_weights",
    "convert_model",
    "fill_parameters",
    "find_blocks",
    "fsdp_modules",
    "has_no_values",
    "move_buffers",
    "ordinary_tensors",
    "prepare_model",
    "run_settings",
    "verify_initialised",
    "without_values",
]
