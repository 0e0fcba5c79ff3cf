"""What the FLOP formula needs of a model: its matrix weights and the shape of its attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class UnknownShapeError(ValueError):
    """The model holds something that the formula does not cover; the message names it."""


@dataclass(frozen=True)
class AttentionShape:
    """Layers with attention, and heads times head size."""

    layers: int
    width: int


def matmul_weight_count(name: str, module: nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield (number of weights, whether they are trained) for each matrix that this module multiplies by.

    Args:
        name: The module's name in the model, for the error.
        module: One module; its children are not looked at.

    Raises:
        UnknownShapeError: The module holds a matrix whose use cannot be told.
    """
    from torch import nn

    if isinstance(module, nn.Linear):
        # The declared sizes, not the tensor's: packed low-bit weights hold fewer elements.
        yield module.in_features * module.out_features, module.weight.requires_grad
        return
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm | nn.RMSNorm):
        return
    for key, parameter in module.named_parameters(recurse=False):
        dimensions = [size for size in parameter.shape if size > 1]
        if len(dimensions) < 2:
            continue
        if len(parameter.shape) != 2 or not (key.startswith("weight") or key.endswith("weight")):
            where = f"{name}.{key}" if name else key
            shape = "x".join(str(size) for size in parameter.shape)
            raise UnknownShapeError(
                f"parameter {where} ({shape}, in {type(module).__name__}) is neither the weight of a linear "
                "layer nor an embedding"
            )
        yield parameter.numel(), parameter.requires_grad


def attention_shape(model: nn.Module, sequence_length: int) -> AttentionShape:
    """Read the attention shape from `model.config`.

    Args:
        model: A model with a configuration in the Hugging Face style.
        sequence_length: Tokens that attend to one another; a longer sliding window makes no difference.

    Raises:
        UnknownShapeError: There is no such configuration, or its attention is not plain full attention.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise UnknownShapeError("it has no config with num_hidden_layers and num_attention_heads")
    _refuse_uncovered(config, sequence_length)
    layers = _positive(config, "num_hidden_layers")
    heads = _positive(config, "num_attention_heads")
    if getattr(config, "head_dim", None) is not None:
        return AttentionShape(layers, heads * _positive(config, "head_dim"))
    return AttentionShape(layers, _positive(config, "hidden_size"))


def _refuse_uncovered(config: object, sequence_length: int) -> None:
    for key in _EXPERT_KEYS:
        if (getattr(config, key, None) or 0) > 1:
            raise UnknownShapeError(f"config.{key}={getattr(config, key)}: experts are not counted yet")
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownShapeError("config.is_encoder_decoder=True: only decoder-only models are counted")
    if getattr(config, "kv_lora_rank", None):
        raise UnknownShapeError("config.kv_lora_rank is set: latent attention is not counted yet")
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds:
        slides = "sliding_attention" in kinds
        if other := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise UnknownShapeError(f"config.layer_types has {', '.join(other)}: not counted yet")
    else:
        slides = window is not None and getattr(config, "use_sliding_window", True)
    if slides and (window is None or window < sequence_length):
        raise UnknownShapeError(
            f"config.sliding_window={window} is shorter than the sequence of {sequence_length}: sliding "
            "windows are not counted yet"
        )


def _positive(config: object, key: str) -> int:
    value = getattr(config, key, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnknownShapeError(f"config.{key}={value!r} is not a positive integer")
    return value
