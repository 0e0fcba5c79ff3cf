"""The callback that adds gradient and parameter statistics of each block to the log record."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dist_env import get_logger

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)

STATISTICS = ("grad", "grad_zeros", "param", "update")
"""Prefixes of the added keys: gradient norm, share of zeros in it, parameter norm, update ratio."""

LEAST_LENGTH = 1e-12
"""Parameter norm taken at least, so that a block of zeros has a ratio."""


class GradientStatistics:
    """Adds the statistics of each block of parameters to the log record.

    | key | figure |
    |---|---|
    | `grad/<block>` | Euclidean norm of the gradient that the optimizer gets, after clipping |
    | `grad_zeros/<block>` | share of its elements that are exactly 0 |
    | `param/<block>` | Euclidean norm of the parameters before the step |
    | `update/<block>` | norm of the change that the step makes, over `param/<block>` |

    Acts at on_pre_optimizer_step and on_optimizer_step, on every rank, only in steps that will be logged (or
    every n), and at on_log_step, where the figures reach the host. They are those of one step, the newest one
    measured. `update` needs a copy of the parameters during that step; leave it out of `statistics` where
    memory is short.

    Args:
        every: Measure each n-th step; the steps that will be logged when not given.
        statistics: Which to add.
        block_of: Names the block of a parameter. Not given: up to the first number in the name
            (`model.layers.3.mlp.up.weight` is of `model.layers.3`), else the module that holds it.

    Raises:
        ConfigurationError: An argument is out of range.
    """

    name = "gradient_statistics"

    def __init__(
        self,
        *,
        every: int | None = None,
        statistics: Sequence[str] = STATISTICS,
        block_of: Callable[[str], str] | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ConfigurationError(
                "every", every, "must be 1 or more", "give a number of steps, such as 10, or leave it out"
            )
        unknown = sorted(set(statistics) - set(STATISTICS))
        if unknown or not statistics:
            known = ", ".join(STATISTICS)
            raise ConfigurationError(
                "statistics", statistics, "must name known statistics", f"choose from {known}"
            )
        self._every = every
        self._statistics = tuple(statistics)
        self._block_of = block_of or block_of_parameter
        self._figures: dict[str, Tensor] = {}
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Check that it is known which steps to measure.

        Raises:
            ConfigurationError: Log entries come by epochs, and `every` was not given.
        """
        if self._every is None and args.logging_strategy == "epoch":
            raise ConfigurationError(
                "every",
                None,
                "measures the steps that will be logged, which logging_strategy='epoch' does not tell in "
                "advance",
                "set every=10, for example",
            )

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: object,
    ) -> None:
        """Measure gradients and parameters, on the device."""
        if not self._is_due(args, state):
            return
        self._figures = {}
        for block, parameters in self._blocks(model).items():
            self._measure(block, parameters)
        if not self._figures:
            logger.warning("GradientStatistics: no parameter has a gradient when the optimizer's step begins")

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Measure how far the step went, on the device."""
        for block, pairs in self._before.items():
            change = _norm([now.detach() - then for now, then in pairs])
            length = _norm([then for _, then in pairs])
            self._figures[f"update/{block}"] = change / length.clamp(min=LEAST_LENGTH)
        self._before = {}

    def on_log_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: MutableMapping[str, object],
        **_: object,
    ) -> None:
        """Bring the figures to the host, all at once, and add them to the record."""
        if self._figures:
            values = torch.stack(list(self._figures.values())).tolist()
            logs.update(zip(self._figures, values, strict=True))
            self._figures = {}

    def _is_due(self, args: TrainingArguments, state: TrainerState) -> bool:
        step = state.global_step + 1
        if self._every is not None:
            return step % self._every == 0
        if args.logging_strategy == "no":
            return False
        first = step == 1 and args.logging_first_step
        return first or step % args.logging_steps == 0 or step == state.max_steps

    def _blocks(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """The parameters with a gradient, by block."""
        blocks: dict[str, list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                blocks.setdefault(self._block_of(name), []).append(parameter)
        return blocks

    def _measure(self, block: str, parameters: list[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        values = [parameter.detach() for parameter in parameters]
        if "grad" in self._statistics:
            self._figures[f"grad/{block}"] = _norm(gradients)
        if "grad_zeros" in self._statistics:
            self._figures[f"grad_zeros/{block}"] = _share_of_zeros(gradients)
        if "param" in self._statistics:
            self._figures[f"param/{block}"] = _norm(values)
        if "update" in self._statistics:
            self._before[block] = [(value, value.clone()) for value in values]


def block_of_parameter(name: str) -> str:
    """The block of a parameter: its name up to the first number, else the module that holds it."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all elements: float32 scalar."""
    norms = [_whole(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _share_of_zeros(tensors: Sequence[Tensor]) -> Tensor:
    """Share of elements that are exactly 0: float32 scalar."""
    zeros = torch.stack([_whole((tensor == 0).sum()) for tensor in tensors]).sum()
    return zeros.float() / sum(tensor.numel() for tensor in tensors)


def _whole(scalar: Tensor) -> Tensor:
    """The value itself where a scalar of sharded tensors still holds one part per rank."""
    if not hasattr(scalar, "full_tensor"):
        return scalar
    whole: Tensor = scalar.full_tensor()
    return whole
