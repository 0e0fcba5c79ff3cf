"""Which gradients are sent as two thin factors, and how large these are."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import CompressionArguments


class MatrixShape(NamedTuple):
    """A gradient as a matrix [rows, columns], sent as factors [rows, rank] and [columns, rank]."""

    rows: int
    columns: int
    rank: int

    @property
    def rate(self) -> float:
        """How many times smaller the factors are than the matrix."""
        return self.rows * self.columns / (self.rank * (self.rows + self.columns))


def matrix_shapes(model: nn.Module, settings: CompressionArguments) -> dict[str, MatrixShape]:
    """The parameters worth compressing.

    Args:
        model: The model.
        settings: Rank of the factors, and how much smaller a tensor must become.

    Returns:
        By name: trainable real tensors of two dimensions or more. The first dimension becomes the rows, all
        others together the columns, as in the paper.
    """
    shapes = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.dim() < 2 or not parameter.numel():
            continue
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        shape = MatrixShape(rows, columns, min(settings.matrix_rank, rows, columns))
        if parameter.is_floating_point() and shape.rate >= settings.min_compression_rate:
            shapes[name] = shape
    return shapes


def first_factor(name: str, shape: MatrixShape) -> Tensor:
    """The factor that the first compressed step begins with.

    It depends on the name alone, so that all ranks draw the same without a message, and no other generator
    is moved.

    Args:
        name: The parameter's name.
        shape: Its matrix.

    Returns:
        Random columns of length 1: float32 [columns, rank] on the CPU.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape.columns, shape.rank, generator=generator, device="cpu", dtype=torch.float32)
    return torch.nn.functional.normalize(drawn, dim=0)
