"""Rules of `PipelineTrainingArguments`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_core import ConfigurationError

from .layout import Layout
from .schedules import ScheduleKind, schedule_kind

if TYPE_CHECKING:
    from .arguments import PipelineArguments, PipelineTrainingArguments

BALANCES = ("flops", "parameters", "layers")


def check_pipeline(args: PipelineTrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    pipeline = args.pipeline
    schedule_kind(pipeline.schedule)
    for name in ("n_microbatches", "stages_per_rank", "replicas"):
        value = getattr(pipeline, name)
        if value is None and name == "stages_per_rank":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigurationError(f"pipeline.{name}", value, "must be a whole number", "give one")
        if value < 1:
            raise ConfigurationError(f"pipeline.{name}", value, "must be at least 1", "raise it")
    if pipeline.balance not in BALANCES:
        raise ConfigurationError(
            "pipeline.balance", pipeline.balance, f"must be one of {', '.join(BALANCES)}", "choose one"
        )
    if pipeline.shard_replicas and pipeline.replicas == 1:
        raise ConfigurationError(
            "pipeline.shard_replicas", True, "has no effect with pipeline.replicas=1", "raise replicas"
        )
    _check_layers(pipeline)
    _check_combinations(args)


def _check_layers(pipeline: PipelineArguments) -> None:
    layers = pipeline.layers_per_stage
    if layers is None:
        return
    if not isinstance(layers, tuple) or not layers:
        raise ConfigurationError(
            "pipeline.layers_per_stage", layers, "must be a tuple of numbers of layers", "such as (4, 4)"
        )
    if any(not isinstance(count, int) or count < 1 for count in layers):
        raise ConfigurationError(
            "pipeline.layers_per_stage", layers, "must have at least one layer for each stage", "raise it"
        )


def _check_combinations(args: PipelineTrainingArguments) -> None:
    if args.fuse_optim_with_backward:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "steps each parameter with every microbatch, and a pipeline has several in each step",
            "leave it out",
        )
    if args.mixed_precision == "fp16" or args.default_dtype == "float16":
        setting = "mixed_precision" if args.mixed_precision == "fp16" else "default_dtype"
        raise ConfigurationError(
            setting,
            getattr(args, setting),
            "needs a loss scale that all stages decide on together, which torch does not have",
            "use bf16",
        )
    if not args.dispatch_batches or not args.dispatches_evaluation:
        setting = "dispatch_eval_batches" if args.dispatch_batches else "dispatch_batches"
        raise ConfigurationError(
            setting,
            False,
            "every stage works on the same batch, which one rank reads for all",
            f"leave {setting} at its default",
        )


def check_schedule(args: PipelineTrainingArguments, kind: ScheduleKind) -> None:
    """Refuse settings that a schedule cannot be carried out with.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if not kind.splits_backward:
        return
    why = (
        f"cannot be used with {kind.name}, which computes the gradients of inputs and of weights apart: "
        "torch takes its graph of single operators to pieces for that"
    )
    instead = "leave it out, or use interleaved_1f1b"
    if args.pipeline.shard_replicas:
        raise ConfigurationError(
            "pipeline.shard_replicas",
            True,
            f"{why}, which leaves out what gathers and drops weights",
            instead,
        )
    if args.torch_compile:
        raise ConfigurationError("torch_compile", True, f"{why}, and compiled code is one piece", instead)
    if args.recomputation != "no":
        raise ConfigurationError(
            "activation_checkpointing",
            args.recomputation,
            f"{why}, and a recomputed block is freed after the first half",
            instead,
        )


def check_layout(args: PipelineTrainingArguments, kind: ScheduleKind, world_size: int) -> Layout:
    """The stages on the ranks, if settings, schedule and ranks fit.

    Raises:
        ConfigurationError: Naming the setting that does not fit.
    """
    pipeline = args.pipeline
    if world_size % pipeline.replicas or pipeline.replicas == world_size > 1:
        raise ConfigurationError(
            "pipeline.replicas",
            pipeline.replicas,
            f"must divide the {world_size} ranks and leave at least two for each pipeline",
            "lower it, start more ranks, or use trainer-ddp",
        )
    default = 2 if kind.several_stages else 1
    stages = pipeline.stages_per_rank or default
    if stages > 1 and not kind.several_stages:
        raise ConfigurationError(
            "pipeline.stages_per_rank", stages, f"{kind.name} has one stage on each rank", "leave it out"
        )
    if kind.layout == "v" and stages != 2:
        raise ConfigurationError(
            "pipeline.stages_per_rank", stages, f"{kind.name} has two stages on each rank", "leave it out"
        )
    layout = Layout(world_size // pipeline.replicas, stages, kind.layout)
    layers = pipeline.layers_per_stage
    if layers is not None and len(layers) != layout.num_stages:
        raise ConfigurationError(
            "pipeline.layers_per_stage",
            layers,
            f"must have one number for each of the {layout.num_stages} stages",
            f"there are {layout.ranks} ranks with {stages} stages each",
        )
    if kind.needs_stages and pipeline.n_microbatches < layout.num_stages:
        raise ConfigurationError(
            "pipeline.n_microbatches",
            pipeline.n_microbatches,
            f"{kind.name} needs at least as many as there are stages, {layout.num_stages}",
            "raise it, or use gpipe or interleaved_1f1b",
        )
    return layout
