"""Cut a model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from dist_env import get_logger
from trainer_core import ConfigurationError, find_blocks

from .blocks import BlockRow, BlockStage
from .costs import costs_of
from .layout import balanced

logger = get_logger(__name__)


class ModelSplitter(Protocol):
    """Cuts a model into stages; give one for a model that is no row of blocks."""

    def __call__(self, model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
        """Make the stages.

        Args:
            model: The whole model; its parameters are on the meta device, and get values later.
            num_stages: How many.

        Returns:
            The stages in order. Each is called as `stage(hidden, **inputs)` with the keyword arguments of the
            model, and returns the hidden state, one tensor; the first one gets None for it, the last one
            returns what the model returns. Their parameters are those of the model, the same objects: that
            decides their names, and which rank holds what. One that several stages have is kept equal.
        """
        ...


@dataclass(frozen=True)
class BlockSplitter:
    """Cuts the row of equal blocks that most models consist of; what it needs is found in the model.

    What is registered before the blocks belongs to the first stage, what comes after them to the last one.
    """

    path: str | None = None
    """Qualified name of the container of the blocks; none: it is looked for."""
    balance: str = "flops"
    """flops, parameters or layers."""
    layers_per_stage: tuple[int, ...] | None = None
    """How many blocks each stage has; none: so that the stages cost the same."""

    def __call__(self, model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
        """Make the stages.

        Raises:
            ConfigurationError: If the blocks are not found, or are fewer than the stages.
        """
        found = find_blocks(model, self.path, needed_by="a pipeline")
        path = found[0][0].rpartition(".")[0]
        row = BlockRow(model, path)
        if len(row.blocks) < num_stages:
            raise ConfigurationError(
                "pipeline.stages_per_rank",
                num_stages,
                f"stages are more than the {len(row.blocks)} blocks of {path}",
                "use fewer ranks or stages, or a deeper model",
            )
        before, after = _around(model, path)
        spans = self._spans(model, row, before, after, num_stages)
        logger.info("stages of %s: %s", path, "; ".join(f"{span.start} to {span.stop - 1}" for span in spans))
        return [BlockStage(model, row, span, before, after) for span in spans]

    def _spans(
        self, model: nn.Module, row: BlockRow, before: list[nn.Module], after: list[nn.Module], stages: int
    ) -> list[range]:
        if self.layers_per_stage is None:
            costs = costs_of(model, row, before, after, self.balance)
            return balanced(costs.blocks, stages, before=costs.before, after=costs.after)
        if sum(self.layers_per_stage) != len(row.blocks):
            raise ConfigurationError(
                "pipeline.layers_per_stage",
                self.layers_per_stage,
                f"must add up to the {len(row.blocks)} blocks of {row.path}",
                "change it, or leave it out",
            )
        ends = [sum(self.layers_per_stage[: number + 1]) for number in range(stages)]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _around(model: nn.Module, path: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules with parameters before and after the container, as they are registered.

    A parameter of a module that the container lies in comes before it.
    """
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    reached = False
    above = {".".join(path.split(".")[:length]) for length in range(path.count(".") + 1)}
    for name, module in model.named_modules():
        if name == path:
            reached = True
        elif name.startswith(f"{path}.") or name in above or name == "":
            if name != path and (name in above or name == "") and module._parameters:
                before.append(_Direct(module))
        elif module._parameters:
            (after if reached else before).append(module)
    return before, after


class _Direct(nn.Module):
    """The parameters that a module has itself, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module._parameters.items():
            self.register_parameter(name, parameter)
