"""What the layers of a model cost, to cut it into stages that take equally long."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from dist_env import get_logger

from .blocks import BlockRow

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

logger = get_logger(__name__)

LENGTHS = (256, 16)
"""Tokens of the row that is counted: the first that the model takes. Longer rows shift weight from the head to
attention, a little."""


class Costs(NamedTuple):
    """Costs in one unit."""

    blocks: list[float]
    before: float
    """Of what comes before the blocks."""
    after: float
    """Of what comes after them."""


def costs_of(
    model: nn.Module, row: BlockRow, before: list[nn.Module], after: list[nn.Module], balance: str
) -> Costs:
    """What each block costs, and what comes before and after them.

    Args:
        model: The model, with parameters on the meta device.
        row: Its blocks.
        before: Modules before them.
        after: Modules after them.
        balance: layers (one for each block, nothing for the rest), parameters, or flops: those of the forward
            pass of a row of 256 tokens, counted by torch on the meta device. A model that does not run there
            is divided by its parameters, which is said.
    """
    if balance == "layers":
        return Costs([1.0] * len(row.blocks), 0.0, 0.0)
    if balance == "flops" and (counted := _counted(model, row, before, after)) is not None:
        return counted
    return Costs(
        [_parameters(block) for block in row.blocks],
        # Looking up an embedding is no work; multiplying by it in the head is.
        sum(_parameters(module) for module in before if not isinstance(module, nn.Embedding)),
        sum(_parameters(module) for module in after),
    )


def _parameters(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


def _counted(
    model: nn.Module, row: BlockRow, before: list[nn.Module], after: list[nn.Module]
) -> Costs | None:
    names = {module: name for name, module in model.named_modules()}
    outline = copy.deepcopy(model).to("meta").eval()
    counter = _run(outline)
    if counter is None:
        return None
    counts = {name: float(sum(table.values())) for name, table in counter.get_flop_counts().items()}
    prefix = type(outline).__name__

    def cost(module: nn.Module) -> float:
        name = names[module]
        return counts.get(f"{prefix}.{name}" if name else prefix, 0.0)

    return Costs(
        [cost(block) for block in row.blocks],
        sum(cost(module) for module in before),
        sum(cost(module) for module in after),
    )


def _run(outline: nn.Module) -> FlopCounterMode | None:
    """Count what a row of tokens takes; None if the model does not run without values, which is said."""
    from torch.utils.flop_counter import FlopCounterMode

    why: Exception | None = None
    for length in LENGTHS:
        tokens = torch.zeros((1, length), dtype=torch.int64, device="meta")
        counter = FlopCounterMode(display=False)
        try:
            with torch.no_grad(), counter:
                outline(input_ids=tokens)
            return counter
        except Exception as error:  # noqa: BLE001 - whatever a model does, there is another way to balance
            why = error
    logger.info(
        "pipeline.balance: %s does not run on tensors without values (%s); its layers are divided by their "
        "parameters",
        type(outline).__name__,
        str(why).partition("\n")[0][:200],
    )
    return None
