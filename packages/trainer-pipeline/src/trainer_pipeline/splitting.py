"""Cut a model into stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from dist_env import get_logger
from trainer_core import ConfigurationError, find_blocks

from .blocks import BlockRow, BlockStage
from .costs import costs_of
from .layout import balanced
from .outline import Outline, OwnParameters

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

    What is called before the blocks belongs to the first stage, what is called after them to the last one.
    Hidden states alone go from stage to stage: what a model makes of weights before its blocks, and gives to
    every block beside the hidden state, later stages would not have; that is refused when training begins.
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
        found = find_blocks(model, self.path, needed_by="pipeline")
        path = found[0][0].rpartition(".")[0]
        row = BlockRow(model, path)
        if len(row.blocks) < num_stages:
            raise ConfigurationError(
                "num_stages",
                num_stages,
                f"are more than the {len(row.blocks)} blocks of {path}",
                "use fewer ranks, a smaller pipeline.stages_per_rank, or a deeper model",
            )
        seen = Outline(model, path)
        row.returns = seen.returns
        if seen.problem:
            logger.info(
                "%s does not run on tensors without values (%s): what comes before and after its blocks is "
                "told by the order in which it is registered",
                type(model).__name__,
                seen.problem,
            )
        before, after = _around(model, path, seen)
        spans = self._spans(row, before, after, seen, num_stages)
        logger.info("stages of %s: %s", path, "; ".join(f"{span.start} to {span.stop - 1}" for span in spans))
        around = [*before.values()], [*after.values()]
        return [BlockStage(model, row, span, *around) for span in spans]

    def _spans(
        self,
        row: BlockRow,
        before: Mapping[str, nn.Module],
        after: Mapping[str, nn.Module],
        seen: Outline,
        stages: int,
    ) -> list[range]:
        if self.layers_per_stage is None:
            costs = costs_of(row, before, after, self.balance, seen)
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


def _around(model: nn.Module, path: str, seen: Outline) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The modules with parameters that are called before and after the blocks, by name.

    Where the order of calls is not known it is that in which they are registered. What belongs to a module
    that the blocks lie in, and not to a submodule of it, comes before them.
    """
    before: dict[str, nn.Module] = {}
    after: dict[str, nn.Module] = {}
    reached = False
    for name, module in model.named_modules():
        reached = reached or name == path
        if name == path or name.startswith(f"{path}.") or not module._parameters:
            continue
        if not name or path.startswith(f"{name}."):
            before[name] = OwnParameters(module)
            continue
        called_after = seen.is_after(name)
        (after if (reached if called_after is None else called_after) else before)[name] = module
    return before, after
