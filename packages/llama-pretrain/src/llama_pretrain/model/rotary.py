"""Rotary position embedding in real arithmetic, with cached tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables for every position, in float32.

    Pair `i` of a head turns by `position * theta ** (-2 i / head_dim)` (Su et al., RoFormer, section 3.2.2),
    with the halves of the head as partners (Hugging Face's `rotate_half` convention). Complex numbers would
    break compiled graphs, so cosine and sine are kept apart.

    The tables are no parameters and are not saved. They are computed again whenever the module changes device
    or dtype, so they stay float32 in a bfloat16 model and are right after a start on the meta device.

    Args:
        head_dim: Width of one head.
        max_positions: Number of positions in the tables.
        theta: Base of the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.theta = theta
        cos, sin = self._tables(torch.get_default_device())
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[length, head_dim / 2]`, float32, of `length` positions from `start` on."""
        return self.cos[start : start + length], self.sin[start : start + length]

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        positions = torch.arange(self.max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies)
        return angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.cos, self.sin = self._tables(self.cos.device)
        return self


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their positions.

    Args:
        x: Queries or keys `[batch, heads, positions, head_dim]`.
        cos: Cosines `[positions, head_dim / 2]`, float32.
        sin: Sines of the same shape.

    Returns:
        The turned heads in the shape and dtype of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
