"""The order in which a model becomes stages, decided here and nowhere else.

1. construct: parameters without storage, buffers with their values;
2. convert: FP8 or QAT layers, and the forward of checkpointed blocks, while all names are there;
3. cut: the stages of all ranks, which share the parameters of the model;
4. release: whatever the stages of this rank do not have;
5. shard: what is left, if copies of a stage share its weights;
6. fill: storage for the rest, and the values that one process would have drawn.

Compilation comes after that, in place, and then the optimizer, which sees what this rank holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_core import (
    ConfigurationError,
    ModelSource,
    checkpoint_activations,
    construct_without_weights,
    convert_model,
    fill_parameters,
    move_buffers,
    ordinary_tensors,
)

from .arguments import PipelineTrainingArguments
from .blocks import BlockRow, BlockStage
from .holding import names_held, release_rest
from .layout import Layout
from .sharding import shard_stages
from .splitting import ModelSplitter


@dataclass(frozen=True)
class Built:
    """What a rank holds of a model."""

    model: nn.Module
    """The model, of which parameters of other ranks are missing."""
    outline: nn.Module
    """The whole model on the meta device, to count its parameters."""
    stages: dict[int, nn.Module]
    """The stages of this rank."""
    holders: dict[str, list[int]]
    """Ranks of the pipeline that hold each parameter."""
    row: BlockRow | None
    """The blocks, if the stages are made of them."""
    spans: tuple[range, ...]
    """Which blocks each stage has, if they are made of them."""


def build_stages(
    source: ModelSource,
    args: PipelineTrainingArguments,
    device: torch.device,
    layout: Layout,
    rank: int,
    splitter: ModelSplitter,
    copies: DeviceMesh | None,
    *,
    draw: bool,
    agree: Callable[[nn.Module], None],
) -> tuple[Built, dict[str, tuple[float, float]]]:
    """Build this rank's stages.

    Args:
        source: What builds the model.
        args: How to build and convert it.
        device: Where this rank computes.
        layout: Which rank has which stage.
        rank: This rank, in its pipeline.
        splitter: Cuts the model.
        copies: The ranks that share the weights of this rank's stages; none if each holds them.
        draw: Whether the weights are to have their initial values; otherwise a checkpoint fills them.
        agree: Called with the whole model, to compare it between the ranks.

    Returns:
        The stages, and by name sum and sum of squares of each initial value that was computed.

    Raises:
        ConfigurationError: If a setting cannot be applied to this model, device or installation.
    """
    if isinstance(source, nn.Module):
        raise ConfigurationError(
            "model",
            type(source).__name__,
            "was built as a whole, and in a pipeline no rank holds the whole model",
            "give model_init, a function that builds it",
        )
    model, values = construct_without_weights(source, args, device)
    agree(model)
    outline = _outline_of(model)
    # It is counted: what is recomputed must be recomputed in it too.
    checkpoint_activations(outline, args)
    convert_model(model, args, device)
    stages = list(splitter(model, layout.num_stages))
    held = _check_stages(model, stages, layout)
    own = {number: stages[number] for number in layout.stages_of(rank)}
    names = {name for name, stage in held.items() if any(number in own for number in stage)}
    made_of_blocks = [stage for stage in stages if isinstance(stage, BlockStage)]
    row = made_of_blocks[0].row if len(made_of_blocks) == len(stages) else None
    release_rest(model, names, row.blocks if row else (), device)
    if copies is not None:
        shard_stages(model, own, copies)
    sums = fill_parameters(model, values if draw else None, device, also_in=own.values())
    move_buffers(model, device)
    holders = {name: sorted({layout.rank_of(number) for number in numbers}) for name, numbers in held.items()}
    spans = tuple(stage.span for stage in made_of_blocks) if row else ()
    return Built(model, outline, own, holders, row, spans), sums


def _outline_of(model: nn.Module) -> nn.Module:
    with ordinary_tensors():
        outline = copy.deepcopy(model)
    for module in outline.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to("meta")
    return outline


def _check_stages(model: nn.Module, stages: Sequence[nn.Module], layout: Layout) -> dict[str, list[int]]:
    """The stages that hold each parameter, by its name in the model.

    Raises:
        ConfigurationError: If they are not as many as they should be, or leave a parameter out.
    """
    if len(stages) != layout.num_stages:
        raise ConfigurationError(
            "model_splitter",
            len(stages),
            f"stages were made where {layout.num_stages} were asked for",
            "make one for each number from 0 to num_stages - 1",
        )
    by_stage = [names_held(model, [stage]) for stage in stages]
    holders = {
        name: [number for number, names in enumerate(by_stage) if name in names]
        for name, _ in model.named_parameters()
    }
    for name, numbers in holders.items():
        if not numbers:
            raise ConfigurationError(
                "model_splitter",
                name,
                "is a parameter that no stage has",
                "give it to a stage, as the same object that the model has",
            )
    _refuse_frozen_ranks(model, holders, layout)
    return holders


def _refuse_frozen_ranks(model: nn.Module, holders: Mapping[str, Sequence[int]], layout: Layout) -> None:
    """Refuse stages in which nothing is trained, unless nothing is trained at all."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    busy = {layout.rank_of(number) for name in trained for number in holders[name]}
    idle = sorted(set(range(layout.ranks)) - busy)
    if trained and idle:
        raise ConfigurationError(
            "model_init",
            type(model).__name__,
            f"has no parameter to train in the stages {layout.stages_of(idle[0])}, so that their rank has "
            "nothing to do for the optimizer",
            "cut it in another way (pipeline.layers_per_stage), use fewer ranks, or unfreeze a part of them",
        )
