"""What powerSGD carries from step to step, by name of the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dist_env import get_logger

from .matrices import MatrixShape, first_factor

_logger = get_logger(__name__)


@dataclass
class Memory:
    """What is carried for one parameter."""

    error: Tensor
    """What this rank still owes: gradients of its own that were not sent yet, [rows, columns]."""
    factor: Tensor
    """Columns of length 1 that the next step begins with, [columns, rank]; equal on all ranks."""


class Memories:
    """The memories of all compressed parameters.

    They go by name, not by bucket: DDP forms its buckets anew after the first step of every process, and a
    training that goes on from a checkpoint would find others than it left.

    Args:
        model: The model.
        shapes: The matrices of the compressed parameters, by name.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, MatrixShape]) -> None:
        self._parameters = dict(model.named_parameters())
        self._shapes = shapes
        self._memories: dict[str, Memory] = {}

    def of(self, name: str) -> Memory:
        """The memory of a compressed parameter; nothing is owed at first."""
        if name not in self._memories:
            rows, columns, _ = self._shapes[name]
            like = self._parameters[name]
            dtype = torch.promote_types(like.dtype, torch.float32)
            error = torch.zeros(rows, columns, dtype=dtype, device=like.device)
            self._memories[name] = Memory(error, first_factor(name, self._shapes[name]).to(error))
        return self._memories[name]

    def state_dict(self) -> dict[str, object]:
        """Errors and factors by name; empty before the first compressed step."""
        return {
            "errors": {name: memory.error for name, memory in self._memories.items()},
            "factors": {name: memory.factor for name, memory in self._memories.items()},
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
        self._memories.clear()
        lost = sorted(errors.keys() - self._shapes.keys())
        if lost:
            _logger.warning(
                "%d tensors are no longer compressed (first: %s): what is owed of their gradients is lost",
                len(lost),
                lost[0],
            )
        for name in errors.keys() & self._shapes.keys():
            memory = self.of(name)
            memory.error.copy_(errors[name])
            # After a change of matrix_rank the factor begins anew, and finds its directions in a few steps.
            if factors[name].shape == memory.factor.shape:
                memory.factor.copy_(factors[name])

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
                    f"compression state of {name!r} has shape {tuple(error.shape)}, and the parameter of "
                    f"that name has {found}: it was saved with another model; load that one"
                )


def _parts(state: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return cast(dict[str, Tensor], state["errors"]), cast(dict[str, Tensor], state["factors"])
