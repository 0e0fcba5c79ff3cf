"""What powerSGD carries from step to step: the error feedback and factors of each parameter, by its name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dist_env import get_logger

from .arguments import CompressionArguments
from .optimizer_state import tensors_of

_logger = get_logger(__name__)


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


@dataclass
class Residual:
    """What is carried for one parameter."""

    error: Tensor
    """What this rank still owes: gradients of its own that were not sent yet, [rows, columns]."""
    factor: Tensor
    """Columns of length 1 that the next step begins with, [columns, rank]; equal on all ranks."""


class ErrorFeedback:
    """The residuals of all compressed parameters.

    They go by name, not by bucket: DDP forms its buckets anew after the first step of every process, and a
    training that continues from a checkpoint would find others than it left.

    Args:
        model: The model.
        shapes: The matrices of the compressed parameters, by name.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, MatrixShape]) -> None:
        self._parameters = dict(model.named_parameters())
        self._shapes = shapes
        self._residuals: dict[str, Residual] = {}

    def of(self, name: str) -> Residual:
        """The residual of a compressed parameter; nothing is owed at first."""
        if name not in self._residuals:
            rows, columns, _ = self._shapes[name]
            like = self._parameters[name]
            dtype = torch.promote_types(like.dtype, torch.float32)
            error = torch.zeros(rows, columns, dtype=dtype, device=like.device)
            self._residuals[name] = Residual(error, first_factor(name, self._shapes[name]).to(error))
        return self._residuals[name]

    def state_dict(self) -> dict[str, object]:
        """Errors and factors by name; empty before the first compressed step."""
        return {
            "errors": {name: residual.error for name, residual in self._residuals.items()},
            "factors": {name: residual.factor for name, residual in self._residuals.items()},
        }

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Put back what this rank saved.

        Settings may have changed since: what does not fit them is left out, with a warning where something
        owed is lost.

        Raises:
            ValueError: If it belongs to another model.
        """
        errors, factors = _parts(state)
        self._check(errors)
        self._residuals.clear()
        lost = sorted(errors.keys() - self._shapes.keys())
        if lost:
            _logger.warning(
                "%d tensors are no longer compressed (first: %s): what is owed of their gradients is lost",
                len(lost),
                lost[0],
            )
        for name in errors.keys() & self._shapes.keys():
            residual = self.of(name)
            residual.error.copy_(errors[name])
            # After a change of matrix_rank the factor begins anew, and finds its directions in a few steps.
            if factors[name].shape == residual.factor.shape:
                residual.factor.copy_(factors[name])

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        """Take up what another number of ranks saved.

        The next gradient is the mean over the ranks of (gradient + error), so what matters of the errors is
        their mean: of the weights' next steps, mean(errors) is what is owed. Each of the new ranks therefore
        starts from that mean, and the mean over them is the same, whatever their number. (The sum of the
        errors is not what has to be kept: the ranks' gradients are averaged, so with more ranks each counts
        for less.) Which rank owed what does not matter: only means of linear functions of the errors are
        ever sent.

        Args:
            states: What each rank saved, in rank order.
            rank: This rank; all ranks start alike.
            world_size: Number of ranks now.

        Raises:
            ValueError: If it belongs to another model.
        """
        parts = [_parts(state) for state in states]
        errors = {
            name: torch.stack([own[name].double() for own, _ in parts]).mean(dim=0) for name in parts[0][0]
        }
        self.load_state_dict({"errors": errors, "factors": parts[0][1]})

    def _check(self, errors: Mapping[str, Tensor]) -> None:
        for name, error in errors.items():
            parameter = self._parameters.get(name)
            found = None if parameter is None else tuple(parameter.shape)
            if parameter is None or not parameter.dim() or error.numel() != parameter.numel():
                raise ValueError(
                    f"compression state of {name!r} has shape {tuple(error.shape)}, but the parameter of "
                    f"that name has {found}, so it was saved with another model. Load that one."
                )


def _parts(state: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    what = "the state of the compression"
    return tensors_of(what, state["errors"]), tensors_of(what, state["factors"])
