"""What is done to a model before it trains: construction, activation checkpointing, compilation."""

from .activation_checkpointing import (
    RecomputeFn,
    blocks_to_checkpoint,
    check_recompute_fn,
    checkpoint_activations,
)
from .blocks import RecompileCounter, compile_model, find_blocks, fsdp_modules, use_sum_reduction
from .compile_cache import CompileCache, check_cache_dir
from .construction import (
    ModelInit,
    ModelSource,
    construct,
    construct_without_weights,
    convert_model,
    prepare_model,
)
from .deferred import InitialValues, construct_deferred, fill_parameters, move_buffers
from .meta_model import fake_tensors, is_fake, ordinary_tensors, verify_initialised
from .run_settings import run_settings

__all__ = [
    "InitialValues",
    "ModelInit",
    "ModelSource",
    "RecomputeFn",
    "CompileCache",
    "RecompileCounter",
    "check_cache_dir",
    "use_sum_reduction",
    "blocks_to_checkpoint",
    "check_recompute_fn",
    "checkpoint_activations",
    "compile_model",
    "construct",
    "construct_deferred",
    "construct_without_weights",
    "convert_model",
    "fill_parameters",
    "find_blocks",
    "fsdp_modules",
    "is_fake",
    "move_buffers",
    "ordinary_tensors",
    "prepare_model",
    "run_settings",
    "verify_initialised",
    "fake_tensors",
]
