"""Cut a model into stages that cost the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import nn

from dist_env import get_logger
from trainer_core import ConfigurationError, find_blocks, ordinary_tensors

from .blocks import BlockRow, BlockStage

logger = get_logger(__name__)

LENGTHS = (256, 16)
"""Tokens of the row that is counted: the first that the model takes. Longer rows shift weight from the head
to attention, a little."""


class ModelSplitter(Protocol):
    """Cuts a model into stages; give one for a model that is not a row of blocks."""

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
                f"is more than the {len(row.blocks)} blocks of {path}",
                "use fewer ranks, a smaller pipeline.stages_per_rank, or a deeper model",
            )
        seen = MetaRun(model, path)
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
        seen: MetaRun,
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
                "change it, or leave it out to divide them evenly",
            )
        ends = [sum(self.layers_per_stage[: number + 1]) for number in range(stages)]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _around(model: nn.Module, path: str, seen: MetaRun) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
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


class MetaRun:
    """A model run once on tensors without values: what is called when, and how much each module computes.

    Args:
        model: The model, which stays as it is.
        path: Where its blocks are.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        self.problem = ""
        """Why the model could not be run; empty if it was."""
        self.returns: int | None = None
        """How many things the blocks return as a tuple; None if they return one thing, or were not seen."""
        self._after: set[str] = set()
        self._called: set[str] = set()
        self._flops: dict[str, float] = {}
        self._path = path
        with ordinary_tensors():
            self._run(model)

    def is_after(self, name: str) -> bool | None:
        """Whether a module is called after the blocks and not before them; None if that is not known."""
        return name in self._after if name in self._called else None

    def flops(self, name: str) -> float:
        """Forward FLOPs of a module."""
        return self._flops.get(name, 0.0)

    def _run(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        for length in LENGTHS:
            meta_model = copy.deepcopy(model).to("meta").eval()
            self._watch(meta_model)
            tokens = torch.zeros((1, length), dtype=torch.int64, device="meta")
            counter = FlopCounterMode(display=False)
            try:
                with torch.no_grad(), counter:
                    meta_model(input_ids=tokens)
            except Exception as error:  # noqa: BLE001 - whatever a model does, there is another way
                self.problem = str(error).partition("\n")[0][:200] or type(error).__name__
                self._after.clear()
                self._called.clear()
                continue
            prefix = f"{type(meta_model).__name__}."
            self.problem, self._flops = (
                "",
                {
                    name.removeprefix(prefix): float(sum(table.values()))
                    for name, table in counter.get_flop_counts().items()
                },
            )
            return

    def _watch(self, meta_model: nn.Module) -> None:
        self._after.clear()
        self._called.clear()
        reached = False

        def note(name: str, *_: object) -> None:
            nonlocal reached
            if name.startswith(f"{self._path}."):
                reached = True
            elif name not in self._called:
                self._called.add(name)
                if reached:
                    self._after.add(name)

        def note_output(module: nn.Module, args: object, output: object) -> None:
            self.returns = len(output) if isinstance(output, tuple) else None

        for name, module in meta_model.named_modules():
            module.register_forward_pre_hook(partial(note, name))
        for block in meta_model.get_submodule(self._path).children():
            block.register_forward_hook(note_output)


class OwnParameters(nn.Module):
    """The parameters that a module has itself, without those of its submodules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The same table, so that the module computes with what sharding puts into this one for a while.
        self._parameters = module._parameters


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
    seen: MetaRun,
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
        # Looking up an embedding is not work; multiplying by it in the head is.
        sum(_parameters(module) for module in before.values() if not isinstance(module, nn.Embedding)),
        sum(_parameters(module) for module in after.values()),
    )


def _parameters(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))


def balanced(costs: Sequence[float], parts: int, *, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Cut a row into consecutive parts so that the most expensive one costs as little as possible.

    Of several such cuts it is the one with the smallest sum of squares, so that the others are even too.

    Args:
        costs: What each item of the row costs; at least as many as parts.
        parts: How many parts, each of at least one item.
        before: What the first part costs besides.
        after: What the last part costs besides.

    Returns:
        The items of each part.
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[i]: (largest, sum of squares, cuts) of the first i items in as many parts as rounds so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for part in range(parts):
        extra = (before if part == 0 else 0.0) + (after if part == parts - 1 else 0.0)
        ends = range(part + 1, count - (parts - 1 - part) + 1)
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, (*cuts, end))
                for start, (largest, squares, cuts) in best.items()
                if start < end
                for cost in (sums[end] - sums[start] + extra,)
            )
            for end in ends
        }
    cuts = best[count][2]
    return [range(start, end) for start, end in zip((0, *cuts), cuts, strict=False)]
