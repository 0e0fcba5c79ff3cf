"""Weights to and from directories in the Hugging Face layout."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    Preprocessor,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
    load_model_weights,
)
from dist_env import StaticDistributedEnvironment
from trainer_core import ConfigurationError

from .config import LlamaConfig
from .llama import Llama

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def dtype_names() -> tuple[str, ...]:
    """Return the names of the dtypes that `save_pretrained` writes."""
    return tuple(_DTYPES)


def has_weights(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory holds weights in the Hugging Face layout."""
    return any((Path(directory) / name).is_file() for name in _WEIGHTS)


def load_pretrained(directory: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Llama:
    """Load a Llama from a directory in the Hugging Face layout, such as a checkpoint or an export.

    Args:
        directory: Holds `config.json` and `model.safetensors`, or the files that
            `model.safetensors.index.json` lists.
        dtype: Dtype of the parameters; weights of another dtype are cast.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        ConfigurationError: If `config.json` is missing or describes a model that is not implemented.
        CheckpointError: If the weights are missing or damaged, or do not fit the configuration.
    """
    config = LlamaConfig.load(directory)
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    model = model.to_empty(device="cpu")
    if config.tie_word_embeddings:
        # Each parameter was just given memory of its own.
        model.lm_head.weight = model.model.embed_tokens.weight
    load_model_weights(model, Path(directory))
    return model.eval()


def save_pretrained(
    model: Llama,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    tokenizer: Preprocessor | None = None,
) -> Path:
    """Write `config.json` and safetensors weights, which transformers reads as `LlamaForCausalLM`.

    Weights of more than 5 GB are divided into several files with an index.

    Args:
        model: The model.
        directory: Made if it is not there; must hold no weights.
        dtype: Dtype of the written weights, one of `dtype_names()`; that of the model when not given.
        tokenizer: Saved beside the weights.

    Returns:
        The directory.

    Raises:
        ConfigurationError: If the dtype is unknown.
        CheckpointError: If there are weights already, or writing fails.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(
            "dtype", dtype, f"must be one of {', '.join(_DTYPES)}", "choose one of these"
        )
    if dtype is not None and _DTYPES[dtype] != model.lm_head.weight.dtype:
        model = copy.deepcopy(model).to(_DTYPES[dtype])
    component = StateComponent(
        key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.GLOBAL, required=True
    )
    manager = CheckpointManager(
        CheckpointConfig(output_dir=Path(directory)),
        dist=StaticDistributedEnvironment(),
        stateful_provider=StaticStatefulProvider([component]),
        preprocessor=tokenizer,
    )
    return manager.save_model(Path(directory))
