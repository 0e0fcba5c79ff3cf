"""What the layers of a model cost, to cut it into stages that take equally long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from dist_env import get_logger

from .blocks import BlockRow
from .outline import Outline, OwnParameters

logger = get_logger(__name__)


class Costs(NamedTuple):
    """Costs in one unit."""

    blocks: list[float]
    before: float
    """Of what comes before the blocks."""
    after: float
    """Of what comes after them."""


def costs_of(
    row: BlockRow,
    before: Mapping[str, nn.Module],
    after: Mapping[str, nn.Module],
    balance: str,
    seen: Outline,
) -> Costs:
    """What each block costs, and what comes before and after them.

    Args:
        row: The blocks.
        before: Modules before them, by name.
        after: Modules after them, by name.
        balance: layers (one for each block, nothing for the rest), parameters, or flops: those of the forward
            pass of a row of tokens. A model that does not run without values is divided by its parameters,
            which is said.
        seen: The model on tensors without values.
    """
    if balance == "layers":
        return Costs([1.0] * len(row.blocks), 0.0, 0.0)
    if balance == "flops" and not seen.problem:
        return Costs(
            [seen.flops(f"{row.path}.{name}") for name in row.names],
            # Parameters that a module has itself are looked up; its FLOPs are those of all that lies in it.
            sum(seen.flops(name) for name, module in before.items() if not isinstance(module, OwnParameters)),
            sum(map(seen.flops, after)),
        )
    if balance == "flops":
        logger.info(
            "pipeline.balance: the model does not run on tensors without values (%s); its layers are divided "
            "by their parameters",
            seen.problem,
        )
    return Costs(
        [_parameters(block) for block in row.blocks],
        # Looking up an embedding is no work; multiplying by it in the head is.
        sum(_parameters(module) for module in before.values() if not isinstance(module, nn.Embedding)),
        sum(_parameters(module) for module in after.values()),
    )


def _parameters(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))
