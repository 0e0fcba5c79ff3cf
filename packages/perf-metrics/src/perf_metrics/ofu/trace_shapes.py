"""The sizes of a matrix multiplication, from the shapes that the profiler recorded for its operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

_FACTORS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2),
    "aten::linear": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::_scaled_mm_v2": (0, 1),
}
"""Where the two factors are among the inputs of an operator, read from the schemas of torch 2.13."""

MATMUL_OPERATORS = frozenset(_FACTORS)
"""Operators whose sizes are read."""


@dataclass(frozen=True, slots=True)
class MatmulSizes:
    """A batch of products of [tokens, k] and [k, features], in torch's row-major terms.

    Attributes:
        batch: Products of this size.
        tokens: Rows of the result, which is cuBLAS's n.
        features: Columns of the result, which is cuBLAS's m.
        k: Depth.
    """

    batch: int
    tokens: int
    features: int
    k: int

    def __str__(self) -> str:
        product = f"[{self.tokens}, {self.k}] x [{self.k}, {self.features}]"
        return product if self.batch == 1 else f"{self.batch} of {product}"

    @property
    def flops(self) -> int:
        """FLOPs that were asked for: 2 m n k, times the batch."""
        return 2 * self.batch * self.tokens * self.features * self.k


def matmul_sizes(operator: str, shapes: object) -> MatmulSizes | None:
    """Read the sizes of an operator.

    Args:
        operator: One of `MATMUL_OPERATORS`.
        shapes: The trace's "Input Dims": a list of shapes.

    Returns:
        The sizes, or None where the shapes are not there, do not fit one another or hold nothing.
    """
    left, right = (_shape(shapes, place) for place in _FACTORS[operator])
    if left is None or right is None:
        return None
    if operator == "aten::linear":
        return _sizes(1, prod(left[:-1]), left[-1], right[::-1])
    if len(left) == 3 and len(right) == 3 and left[0] == right[0]:
        return _sizes(left[0], left[1], left[2], right[1:])
    if len(left) == 2:
        return _sizes(1, left[0], left[1], right)
    return None


def _sizes(batch: int, tokens: int, k: int, right: Sequence[int]) -> MatmulSizes | None:
    if len(right) != 2 or right[0] != k or min(batch, tokens, k, right[1]) < 1:
        return None
    return MatmulSizes(batch, tokens, right[1], k)


def _shape(shapes: object, place: int) -> Sequence[int] | None:
    if not isinstance(shapes, list) or len(shapes) <= place:
        return None
    shape = shapes[place]
    if not isinstance(shape, list) or not shape or any(type(size) is not int for size in shape):
        return None
    return shape
