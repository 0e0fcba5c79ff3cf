"""The settings of pipeline training, and their rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from dist_env import ParallelLayout, get_logger
from trainer_core import ConfigurationError, DataParallelArguments, TrainingArguments

from .schedules import ScheduleKind, StageLayout, schedule_kind

logger = get_logger(__name__)

BALANCES = ("flops", "parameters", "layers")


@dataclass(frozen=True, kw_only=True)
class PipelineArguments:
    """How the layers of the model are spread over the ranks, and in which order they compute."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipe_v."""
    n_microbatches: int = 4
    """Pieces of a batch. A batch that it does not divide is filled up with rows that do not count."""
    stages_per_rank: int | None = None
    """Stages of each rank; none: 1, or 2 for schedules that take several."""
    balance: str = "flops"
    """How layers are divided among stages: flops (counted, embedding and head included), parameters, or
    layers (as many for each)."""
    layers_per_stage: tuple[int, ...] | None = None
    """How many layers each stage has, instead of `balance`."""
    replicas: int = 1
    """Deprecated: say mesh='pp=2,dp=2'. Pipelines that work on different data, each of world size / replicas
    ranks."""
    shard_replicas: bool = False
    """Deprecated: say mesh='pp=2,shard=2'. Whether the replicas of a stage share out its weights."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrainingArguments(DataParallelArguments):
    """What `PipelineTrainer` takes: adds how the model is cut into stages, and the schedule."""

    pipeline: PipelineArguments = field(default_factory=PipelineArguments)
    """In a pipeline: which layers each rank has, and in which order they compute."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        self.check_stages()

    def check_stages(self) -> None:
        """Check what this class adds, alone: for a class that inherits the settings of several trainers.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        check_settings(self.pipeline)
        check_combinations(self)
        pipeline = self.pipeline
        for name, given in (("replicas", pipeline.replicas > 1), ("shard_replicas", pipeline.shard_replicas)):
            if given and self.mesh:
                raise ConfigurationError(
                    f"pipeline.{name}",
                    getattr(pipeline, name),
                    f"cannot be given together with mesh={self.mesh!r}, which determines it",
                    f"leave pipeline.{name} out, and set mesh='pp=2,dp=2' or mesh='pp=2,shard=2', for "
                    "example",
                )

    def layout(self, world_size: int) -> ParallelLayout | None:
        """The sizes of all dimensions; None if all ranks are in one pipeline.

        Args:
            world_size: Number of ranks of the job.

        Raises:
            ConfigurationError: If `pipeline.replicas` does not fit them.
            dist_env.DistributedEnvironmentError: If `mesh` does not.
        """
        replicas = self.pipeline.replicas
        if self.mesh or replicas == 1 or world_size == 1:
            return super().layout(world_size)
        logger.warning("pipeline.replicas is deprecated; set mesh='pp=..,dp=..', or 'pp=..,shard=..'")
        if world_size % replicas or replicas == world_size:
            raise ConfigurationError(
                "pipeline.replicas",
                replicas,
                f"must divide the {world_size} ranks and leave at least two for each pipeline",
                "lower it, start more ranks, or use trainer-ddp",
            )
        if self.pipeline.shard_replicas:
            return ParallelLayout(pipeline=world_size // replicas, shard=replicas)
        return ParallelLayout(pipeline=world_size // replicas, replicate=replicas)

    @property
    def uses_blocks(self) -> bool:
        """Whether a setting works on the blocks that transformer_layers_path leads to."""
        return True


def check_settings(pipeline: PipelineArguments) -> None:
    """Check what can be said without the other arguments and the ranks.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    schedule_kind(pipeline.schedule)
    for name in ("n_microbatches", "stages_per_rank", "replicas"):
        value = getattr(pipeline, name)
        if value is None and name == "stages_per_rank":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigurationError(
                f"pipeline.{name}", value, "must be a whole number", "give one, such as 2"
            )
        if value < 1:
            raise ConfigurationError(f"pipeline.{name}", value, "must be at least 1", "set it to 1 or more")
    if pipeline.balance not in BALANCES:
        raise ConfigurationError(
            "pipeline.balance",
            pipeline.balance,
            f"must be one of {', '.join(BALANCES)}",
            "choose one of these",
        )
    if pipeline.shard_replicas and pipeline.replicas == 1:
        raise ConfigurationError(
            "pipeline.shard_replicas",
            True,
            "has no effect with pipeline.replicas=1",
            "set pipeline.replicas=2, for example, or leave it out",
        )
    layers = pipeline.layers_per_stage
    if layers is None:
        return
    if not isinstance(layers, tuple) or not layers:
        raise ConfigurationError(
            "pipeline.layers_per_stage",
            layers,
            "must be a tuple of numbers of layers",
            "write (4, 4), for example",
        )
    if any(not isinstance(count, int) or count < 1 for count in layers):
        raise ConfigurationError(
            "pipeline.layers_per_stage",
            layers,
            "must have at least one layer for each stage",
            "give each stage 1 layer or more, such as (4, 4)",
        )


def check_combinations(args: TrainingArguments) -> None:
    """Refuse settings that no pipeline can honour.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.fuse_optim_with_backward:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "steps each parameter after every microbatch, but a pipeline has several in each step",
            "leave it out",
        )
    if args.mixed_precision == "fp16" or args.default_dtype == "float16":
        setting = "mixed_precision" if args.mixed_precision == "fp16" else "default_dtype"
        raise ConfigurationError(
            setting,
            getattr(args, setting),
            "needs a loss scale that all stages share, which torch does not have",
            "use bfloat16",
        )
    if isinstance(args, DataParallelArguments) and not (args.dispatch_batches and args.dispatches_evaluation):
        setting = "dispatch_eval_batches" if args.dispatch_batches else "dispatch_batches"
        raise ConfigurationError(
            setting,
            False,
            "lets every rank read its own batches, but all stages work on the same batch, which one rank "
            "reads for them",
            f"leave {setting} at its default",
        )


def check_schedule(
    args: TrainingArguments, pipeline: PipelineArguments, kind: ScheduleKind, layout: ParallelLayout
) -> None:
    """Refuse settings that a schedule cannot be carried out with.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if not kind.splits_backward:
        return
    why = (
        f"cannot be used with {kind.name}, which computes the gradients of inputs and of weights apart and "
        "takes torch's graph to pieces for that"
    )
    instead = "leave it out, or use interleaved_1f1b"
    if layout.shards_weights:
        setting = "pipeline.shard_replicas" if pipeline.shard_replicas else "mesh"
        raise ConfigurationError(
            setting,
            True if pipeline.shard_replicas else str(layout),
            f"{why}. That leaves out what gathers and drops weights",
            instead,
        )
    if args.torch_compile:
        raise ConfigurationError("torch_compile", True, f"{why}, but compiled code is one piece", instead)
    if args.recomputation != "no":
        raise ConfigurationError(
            "activation_checkpointing",
            args.recomputation,
            f"{why}, but a recomputed block is freed after the first half",
            instead,
        )


def stage_layout(pipeline: PipelineArguments, kind: ScheduleKind, ranks: int) -> StageLayout:
    """The stages on the ranks of a pipeline, if settings, schedule and ranks fit.

    Args:
        pipeline: The settings.
        kind: The schedule.
        ranks: Number of ranks of a pipeline.

    Raises:
        ConfigurationError: Naming the setting that does not fit.
    """
    default = 2 if kind.several_stages else 1
    stages = pipeline.stages_per_rank or default
    if stages > 1 and not kind.several_stages:
        raise ConfigurationError(
            "pipeline.stages_per_rank",
            stages,
            f"must be 1 with {kind.name}, which has one stage on each rank",
            "leave it out",
        )
    if kind.layout == "v" and stages != 2:
        raise ConfigurationError(
            "pipeline.stages_per_rank",
            stages,
            f"must be 2 with {kind.name}, which has two stages on each rank",
            "leave it out",
        )
    layout = StageLayout(ranks, stages, kind.layout)
    layers = pipeline.layers_per_stage
    if layers is not None and len(layers) != layout.num_stages:
        raise ConfigurationError(
            "pipeline.layers_per_stage",
            layers,
            f"must have one number for each of the {layout.num_stages} stages",
            f"give {layout.num_stages} numbers, for {layout.ranks} ranks with {stages} stages each",
        )
    if kind.needs_stages and pipeline.n_microbatches < layout.num_stages:
        raise ConfigurationError(
            "pipeline.n_microbatches",
            pipeline.n_microbatches,
            f"must be at least {layout.num_stages} with {kind.name}, the number of stages",
            "raise it, or use gpipe or interleaved_1f1b",
        )
    return layout
