"""Plan the memory of each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

import trainer_core
from trainer_core import ConfigurationError, ModelInit, Plan

from .arguments import PipelineTrainingArguments
from .splitting import ModelSplitter
from .transform import PipelineStages

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def plan(
    model_init: ModelInit,
    args: PipelineTrainingArguments,
    *,
    world_size: int,
    sequence_length: int | None = None,
    batch: Mapping[str, Tensor] | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    model_splitter: ModelSplitter | None = None,
) -> Plan:
    """Say what each stage of a pipeline will need of memory: `trainer_core.plan` with stages.

    Activations are those of all microbatches that the schedule has under way. Schedules of several stages a
    rank do not wait for what they send: it is counted to the end of the step, which is the longest that it
    can take.

    Args:
        model_init: Builds the model, as the trainer is given it.
        args: The settings of the run.
        world_size: Number of ranks, those of all copies of the pipeline.
        sequence_length: Tokens of one example of `input_ids` and `labels`.
        batch: What a pipeline gets at a time, for models that take something else; only shapes and dtypes
            count.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.
        model_splitter: As the trainer is given it.

    Returns:
        The plan of one pipeline; the others need the same.

    Raises:
        ConfigurationError: If the settings do not fit the ranks or the model, not one of batch and sequence
            length is given, or model or loss cannot do without values.
        dist_env.DistributedEnvironmentError: If this process has a process group.

    Example:
        >>> print(plan(model_init, args, world_size=8, sequence_length=4096))  # doctest: +SKIP
    """
    if world_size < 2:
        raise ConfigurationError("world_size", world_size, "is too small for a pipeline", "give at least 2")
    if (layout := args.layout(world_size)) is not None and layout.pipeline == 1:
        raise ConfigurationError("mesh", args.mesh, "has no stages", "give it some, such as mesh='pp=2'")
    return trainer_core.plan(
        args,
        model_init=model_init,
        world_size=world_size,
        sequence_length=sequence_length,
        batch=batch,
        optimizer_factory=optimizer_factory,
        parallel=[PipelineStages(splitter=model_splitter)],
    )
