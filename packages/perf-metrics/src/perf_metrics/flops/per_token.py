"""Model FLOPs per token: the accounting of PaLM (arXiv:2204.02311, appendix B).

One multiply-add is 2 FLOPs. A weight used in a matrix multiplication costs 2 FLOPs per token forward, 2 for
the gradient of its input and 2 for its own gradient: 6 N. Attention scores and their product with the values
cost 4 L d S forward and 8 L d S backward: 12 L d S, or half of it for kernels that skip the masked triangle.
Recomputation of activations does not count.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from .model_shape import AttentionShape, UnknownShapeError, attention_shape, matmul_weight_count

if TYPE_CHECKING:
    from torch import nn

Causal: TypeAlias = Literal["full", "half"]

_log = logging.getLogger("perf_metrics")


class FlopsUnknownError(ValueError):
    """The model FLOPs of this model cannot be told; the message says why and what to do."""


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per token of one training step, forward and backward.

    Attributes:
        matmul: Of the weight matrices, the output projection included and the embedding lookup left out.
        attention: Of the scores and their product with the values.
    """

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        """The sum of both parts."""
        return self.matmul + self.attention


def palm_flops_per_token(
    n_parameters: float,
    n_layers: int,
    d_attention: int,
    sequence_length: int,
    *,
    causal: Causal = "full",
) -> float:
    """Return 6 N + 12 L d S, the training FLOPs per token of PaLM's appendix B.

    Published tables differ in what they put into N (with or without embeddings) and in `causal`; with plain
    numbers each of them can be computed.

    Args:
        n_parameters: N, the parameters counted.
        n_layers: L, the layers with attention.
        d_attention: d, heads times head size.
        sequence_length: S, in tokens.
        causal: "full" counts the whole score matrix, "half" only the triangle that causal kernels compute.

    Raises:
        ValueError: A number is negative, or `causal` is neither "full" nor "half".
    """
    _check_causal(causal)
    numbers = {"n_parameters": n_parameters, "n_layers": n_layers, "d_attention": d_attention}
    for name, number in {**numbers, "sequence_length": sequence_length}.items():
        if not number >= 0 or math.isinf(number):
            raise ValueError(f"{name}={number!r}: must be a finite number, 0 or more")
    return 6.0 * n_parameters + 12.0 * n_layers * d_attention * sequence_length * _causal_factor(causal)


def flops_per_token_breakdown(
    model: nn.Module, sequence_length: int, *, causal: Causal = "full"
) -> FlopsPerToken:
    """Return the training FLOPs per token of a decoder-only transformer, by part.

    The model's own `flops_per_token(sequence_length)` method decides when it has one: it returns a
    `FlopsPerToken` in the "full" convention, or one number for everything, which cannot be halved, or None.

    Otherwise weights are counted from the modules (`nn.Linear`, its subclasses, and modules whose weight is a
    matrix, such as `Conv1D` of GPT-2), each use once, so a tied output projection counts and the lookup does
    not. The attention shape comes from `model.config`: `num_hidden_layers`, `num_attention_heads`, and
    `head_dim` or `hidden_size`. Shapes suffice: a model on the meta device will do.

    Frozen weights: 2 N forward, and 2 N more where a gradient passes through, that is when a parameter
    registered before it is trained. A trained weight always counts 6 N. Attention counts its backward in the
    layers that a gradient reaches. With nothing trained, the forward alone is counted.

    Args:
        model: The model itself, on any device, meta included; of `DistributedDataParallel`, its `module`.
        sequence_length: S in tokens; with packed documents that do not attend to one another, their length.
        causal: "full" counts the whole score matrix, "half" only the triangle that causal kernels compute.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is not one of the two.
        FlopsUnknownError: The structure is not covered (experts, convolutions, sliding window shorter than
            the sequence, latent attention, no configuration), with the reason.
    """
    _check_causal(causal)
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length!r}: must be a positive integer, in tokens")
    own = getattr(model, "flops_per_token", None)
    if callable(own):
        return _from_hook(own(sequence_length), type(model).__name__, causal)
    try:
        shape = attention_shape(model, sequence_length)
        matmul = float(sum(_weight_passes(model)))
    except UnknownShapeError as reason:
        raise FlopsUnknownError(
            f"model FLOPs of {type(model).__name__} unknown: {reason}; give the model a method "
            "flops_per_token(sequence_length) that returns its training FLOPs per token"
        ) from None
    per_layer = 4.0 * shape.width * sequence_length * _causal_factor(causal)
    attention = per_layer * (shape.layers + 2 * _layers_with_backward(model, shape))
    return FlopsPerToken(matmul, attention)


def model_flops_per_token(model: nn.Module, sequence_length: int, *, causal: Causal = "full") -> float | None:
    """Return the training FLOPs per token (forward and backward), or None when they cannot be told.

    The counting rules are those of `flops_per_token_breakdown`. The reason for a None is logged once as a
    warning of the logger "perf_metrics".

    Args:
        model: The model, on any device, meta included.
        sequence_length: S, in tokens.
        causal: "full" counts the whole score matrix, "half" only the triangle that causal kernels compute.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is not one of the two.
    """
    try:
        return flops_per_token_breakdown(model, sequence_length, causal=causal).total
    except FlopsUnknownError as reason:
        _warn_once(str(reason))
        return None


def _weight_passes(model: nn.Module) -> Iterator[int]:
    """Yield, per module in the order of registration, FLOPs per token of its matrix multiplications."""
    trained_below = False
    for name, module in model.named_modules():
        for count, trained in matmul_weight_count(name, module):
            yield count * (6 if trained else 4 if trained_below else 2)
        trained_below = trained_below or any(p.requires_grad for p in module.parameters(recurse=False))


def _layers_with_backward(model: nn.Module, shape: AttentionShape) -> int:
    """Count the layers that a gradient reaches: those at and above the lowest trained parameter."""
    if not any(p.requires_grad for p in model.parameters()):
        return 0
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == shape.layers:
            below = _parameters_before(model, module)
            if any(p.requires_grad for p in below):
                return shape.layers
            trained = (any(p.requires_grad for p in layer.parameters()) for layer in module)
            first = next((index for index, layer in enumerate(trained) if layer), shape.layers)
            return shape.layers - first
    return shape.layers


def _parameters_before(model: nn.Module, stop: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if module is stop:
            return
        yield from module.parameters(recurse=False)


def _from_hook(answer: object, owner: str, causal: Causal) -> FlopsPerToken:
    if isinstance(answer, FlopsPerToken):
        return FlopsPerToken(answer.matmul, answer.attention * _causal_factor(causal))
    if answer is None:
        raise FlopsUnknownError(f"model FLOPs of {owner} unknown: its flops_per_token returned None")
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not 0 < answer < math.inf:
        raise ValueError(
            f"{owner}.flops_per_token returned {answer!r}: must be a positive number, a FlopsPerToken, or "
            "None when it cannot be told"
        )
    if causal == "half":
        raise FlopsUnknownError(
            f"{owner}.flops_per_token returned one number, so its attention part cannot be halved; return a "
            'FlopsPerToken from it, or use causal="full"'
        )
    return FlopsPerToken(float(answer), 0.0)


def _causal_factor(causal: Causal) -> float:
    return 0.5 if causal == "half" else 1.0


def _check_causal(causal: str) -> None:
    if causal not in get_args(Causal):
        raise ValueError(f'causal={causal!r}: must be "full" or "half"')


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
