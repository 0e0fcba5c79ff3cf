"""Tensors side by side in one buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from dist_env import decode_value, encode_value

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""

Spec = tuple[torch.dtype, tuple[int, ...]]


def aligned(num_bytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is at least ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache
def encode_specs(specs: tuple[Spec, ...]) -> bytes:
    """Types and shapes as bytes."""
    return encode_value([(dtype, *shape) for dtype, shape in specs])


def decode_specs(data: bytes) -> list[Spec]:
    """Types and shapes of tensors that `encode_specs` wrote.

    Raises:
        ValueError: The bytes say something else, or tensors of impossible sizes.
    """
    rows = decode_value(data)
    if not isinstance(rows, list) or not all(map(_is_spec, rows)):
        raise ValueError("the message describes no tensors")
    return [(dtype, tuple(shape)) for dtype, *shape in rows]


def _is_spec(row: object) -> bool:
    if not isinstance(row, tuple) or not row or not isinstance(row[0], torch.dtype):
        return False
    sizes = [size for size in row[1:] if type(size) is int and size >= 0]
    return len(sizes) == len(row) - 1 and math.prod(max(size, 1) for size in sizes) < 2**56


def spec_of(tensors: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    """Type and shape of each tensor."""
    return tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])


class Layout:
    """Where each of some tensors lies in a buffer, one behind the other, each at a multiple of `ALIGNMENT`.

    Args:
        specs: Type and shape of each tensor.

    Attributes:
        num_bytes: Size of all together.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._places: list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]] = []
        self.num_bytes = 0
        for dtype, shape in specs:
            self._places.append((dtype, self.num_bytes // dtype.itemsize, shape, _strides(shape)))
            self.num_bytes += aligned(math.prod(shape) * dtype.itemsize)

    def tensors_in(self, buffer: torch.Tensor, start: int) -> list[torch.Tensor]:
        """The tensors that lie in a buffer from byte ``start`` on, a multiple of `ALIGNMENT`.

        They share the memory of the buffer, but are no views of it or of one another: changing one in place
        does not upset what autograd has saved of another.
        """
        storage, device = buffer.untyped_storage(), buffer.device
        return [
            torch.empty(0, dtype=dtype, device=device).set_(
                storage, start // dtype.itemsize + offset, shape, strides
            )
            for dtype, offset, shape, strides in self._places
        ]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))
