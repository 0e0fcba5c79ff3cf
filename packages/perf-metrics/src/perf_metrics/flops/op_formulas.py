"""What one operator computes: torch's formulas, and those that torch lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from math import prod
from typing import TypeAlias

import torch

Shape: TypeAlias = tuple[int, ...]
Formula: TypeAlias = Callable[..., float]

FUSED_BACKWARD = 2.5
"""Backward of fused attention over its forward: five products for two, as the scores are computed again."""

SCORES_AGAIN = 0.5
"""The part of that which is recomputation."""


@cache
def formulas() -> Mapping[object, Formula]:
    """FLOPs by operator (an `OpOverloadPacket`), for inputs and outputs as they are called."""
    from torch.utils.flop_counter import flop_registry

    return {**flop_registry, **_missing()}


@cache
def attention_operators() -> frozenset[object]:
    """Fused attention, forward and backward."""
    named = (name for name in formulas() if "attention" in str(name))
    return frozenset(named)


def is_backward_of_attention(operator: object) -> bool:
    """Whether an operator is the backward of fused attention, scores computed again included."""
    return operator in attention_operators() and "backward" in str(operator)


def _missing() -> dict[object, Formula]:
    aten = torch.ops.aten
    known: dict[str, Formula] = {
        # torch 2.13 counts nothing for the CPU's kernel, and refuses fewer key heads than query heads.
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_grouped_mm": _grouped,
        "_scaled_grouped_mm": _grouped,
        # torch 2.13 forgets the groups in the backward of a convolution.
        "convolution_backward": _convolution_backward,
    }
    return {
        getattr(aten, name): _of_shapes(formula) for name, formula in known.items() if hasattr(aten, name)
    }


def _of_shapes(formula: Callable[..., float]) -> Formula:
    @wraps(formula)
    def count(*args: object, out_val: object = None, **_: object) -> float:
        return formula(*(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args))

    return count


def _attention(query: Shape, key: Shape, value: Shape, *_: object) -> float:
    """[batch, heads, queries, size] and two more; keys and values may have fewer heads."""
    batch, heads, queries, size = query
    return 2.0 * batch * heads * queries * key[-2] * (size + value[-1])


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: object) -> float:
    return FUSED_BACKWARD * _attention(query, key, value)


def _grouped(left: Shape, right: Shape, *_: object) -> float:
    """Products of groups of rows, or of groups of columns: each row of the left is used once."""
    if len(left) == 2 and len(right) == 2:
        return 2.0 * left[0] * left[1] * right[1]
    return 2.0 * prod(left) * right[-1]


def _convolution_backward(
    grad: Shape,
    source: Shape,
    weight: Shape,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    output_mask: tuple[bool, ...],
    *_: object,
) -> float:
    places = prod((source if transposed else grad)[2:])
    forward = 2.0 * grad[0] * places * prod(weight)
    return forward * sum(output_mask[:2])
