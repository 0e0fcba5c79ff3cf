"""Layers of the model on different ranks, as a transform that combines with others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_env import ParallelLayout
from trainer_core import (
    BuiltModel,
    ConfigurationError,
    ModelTransform,
    Ranks,
    StepHooks,
    TrainingArguments,
    generators_of_rank_0,
    logits_of_one_rank,
    saved_buffers,
)

from .arguments import PipelineArguments, check_combinations, check_schedule, check_settings, stage_layout
from .blocks import BlockStage
from .executor import PipelineExecutor, Place
from .generation import in_turn
from .microbatches import ActivationSpecs
from .param_pruning import names_held, release_rest
from .schedules import ScheduleFactory, ScheduleKind, StageLayout, kind_of_factory, schedule_kind
from .splitting import BlockSplitter, ModelSplitter
from .stage_forward import ActivationChannel
from .tied_weights import TiedWeights, pipeline_subgroup


class PipelineStages(ModelTransform):
    """Every rank of a pipeline has some layers of the model, and microbatches go from rank to rank.

    Combines with what replicates or shards the stages: gradients are synced after the last microbatch of an
    optimizer step only, whatever the number of batches.

    Args:
        settings: Schedule, microbatches and how layers are divided; otherwise `args.pipeline`, where the
            arguments have it, or the defaults.
        splitter: Cuts the model into stages; `BlockSplitter`, as the settings say, otherwise.
        schedule: A schedule class of `torch.distributed.pipelining`, a subclass or a partial of one, instead
            of the name in the settings.

    Raises:
        ConfigurationError: If `schedule` is not a schedule class.

    Example:
        >>> Trainer(args, parallel=[PipelineStages(), FullyShard()], ...)  # args.mesh: "pp=2,shard=4"
        ... # doctest: +SKIP
    """

    axis: ClassVar[str] = "pipeline"

    def __init__(
        self,
        settings: PipelineArguments | None = None,
        *,
        splitter: ModelSplitter | None = None,
        schedule: ScheduleFactory | None = None,
    ) -> None:
        self._settings = settings
        self._splitter = splitter
        self._given_kind = None if schedule is None else kind_of_factory(schedule)
        self.activation_specs: ActivationSpecs = ActivationSpecs()
        """What is known of the hidden states between stages."""

    @classmethod
    def from_args(cls, args: TrainingArguments) -> PipelineStages:
        """What a run gets whose `mesh` has stages, and that was given none of these."""
        return cls()

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse settings that do not fit one another, the schedule or the ranks.

        Raises:
            ConfigurationError: Naming the setting.
        """
        layout = ranks.layout
        if layout.pipeline == 1:
            return
        settings, kind = self._settings_of(args), self._kind_of(args)
        check_settings(settings)
        check_combinations(args)
        if settings.replicas not in (1, layout.data_count):
            raise ConfigurationError(
                "pipeline.replicas",
                settings.replicas,
                f"contradicts the layout {layout}",
                "leave it out, and set mesh",
            )
        check_schedule(args, settings, kind, layout)
        stage_layout(settings, kind, layout.pipeline)

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """The schedule, which decides how many microbatches are under way."""
        if layout.pipeline == 1:
            return ()
        return (f"{self._kind_of(args).name}, {self._settings_of(args).n_microbatches} microbatches",)

    def before_conversion(self, built: BuiltModel) -> None:
        """Refuse a model that has values: no rank may hold the whole of it.

        Raises:
            ConfigurationError: If one of its parameters is not on the meta device.
        """
        if any(not parameter.is_meta for parameter in built.model.parameters()):
            raise ConfigurationError(
                "model",
                type(built.model).__name__,
                "was built as a whole, but in a pipeline no rank holds the whole model",
                "give model_init, a function that builds it",
            )

    def apply(self, built: BuiltModel) -> None:
        """Cut the model, and keep the stages of this rank; collective.

        Raises:
            ConfigurationError: If the model cannot be cut, or ranks were given different settings.
        """
        ranks, model = built.ranks, built.model
        up = ranks.pipeline_group
        if up is None:
            return
        settings, kind = self._settings_of(built.args), self._kind_of(built.args)
        ranks.check_same({"schedule": kind.name, "pipeline": asdict(settings)})
        layout = stage_layout(settings, kind, ranks.layout.pipeline)
        place = Place(layout, ranks.coordinates["pipeline"], up)
        splitter = self._splitter or BlockSplitter(
            built.args.transformer_layers_path, settings.balance, settings.layers_per_stage
        )
        stages = list(splitter(model, layout.num_stages))
        held = _check_stages(model, stages, layout)
        own = {number: stages[number] for number in layout.stages_of(place.rank)}
        blocks = [stage for stage in stages if isinstance(stage, BlockStage)]
        row = blocks[0].row if len(blocks) == len(stages) else None
        kept = {name for name, numbers in held.items() if any(number in own for number in numbers)}
        release_rest(model, kept, row.blocks if row else (), ranks.device)
        with ranks.lost_rank_errors("connecting the stages"):
            down = pipeline_subgroup(ranks, range(layout.ranks))
            holders = {name: sorted({layout.rank_of(n) for n in numbers}) for name, numbers in held.items()}
            tied = TiedWeights(holders, ranks)
        channel = ActivationChannel(layout, place.rank, up, down or up, ranks.device)
        built.executor = executor = PipelineExecutor(
            built, place, kind, settings.n_microbatches, own, channel, tied, self.activation_specs
        )
        built.parts = list(own.values())
        built.stages = tuple(own)
        built.keeps_sends = kind.several_stages  # such schedules do not wait for what they send
        built.has_loss = place.rank == layout.last_rank
        spans = tuple(stage.span for stage in blocks) if row else ()
        built.layers = tuple((spans[number].start, spans[number].stop - 1) for number in own if spans)
        built.hooks.append(PipelineHooks(built, place, executor, channel, tied, spans))
        if row is not None:
            built.compiled_blocks = row.path
            model.register_forward_pre_hook(row.refuse_call)

    def _settings_of(self, args: TrainingArguments) -> PipelineArguments:
        if self._settings is not None:
            return self._settings
        own = getattr(args, "pipeline", None)
        return own if isinstance(own, PipelineArguments) else PipelineArguments()

    def _kind_of(self, args: TrainingArguments) -> ScheduleKind:
        return self._given_kind or schedule_kind(self._settings_of(args).schedule)


class PipelineHooks(StepHooks):
    """What stages add to a run: a schedule that fits, common buffers, texts, and how long ranks wait.

    Args:
        built: What this rank holds.
        place: Where it is in its pipeline.
        executor: Runs the stages.
        channel: Takes hidden states outside of the schedule.
        tied: Weights that other stages have, too.
        spans: The blocks of each stage of all ranks; empty if stages are not made of blocks.
    """

    def __init__(
        self,
        built: BuiltModel,
        place: Place,
        executor: PipelineExecutor,
        channel: ActivationChannel,
        tied: TiedWeights,
        spans: Sequence[range],
    ) -> None:
        self._built = built
        self._own = list(built.parts)
        self._executor = executor
        self._channel = channel
        self._tied = tied
        self.place = place
        self.spans = spans

    def attach(self, optimizer: Optimizer | None) -> None:
        """Find the weights that are tied, and refuse a schedule that torch cannot make.

        Raises:
            ConfigurationError: If it cannot.
        """
        self._built.counted_elsewhere += self._tied.attach(self._built.model)
        if optimizer is not None:
            self._executor.attach()

    @contextmanager
    def synced_weights(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which all ranks of a pipeline have one set of buffers before and after the blocks.

        It is that of the stage in use: every rank computes what comes before the blocks, but only the first
        stage does so with its weights. Collective at entry; afterwards each rank has its own again.
        """
        buffers = self._buffers_outside()
        own = [buffer.clone() for buffer, _ in buffers]
        for buffer, comes_after in buffers:
            source = self.place.layout.last_rank if comes_after else 0
            dist.broadcast(buffer, group=self.place.group, group_src=source)
        try:
            yield
        finally:
            with torch.no_grad():
                for (buffer, _), before in zip(buffers, own, strict=True):
                    buffer.copy_(before)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all ranks call the model alike, and get the same logits; collective.

        Raises:
            ConfigurationError: If stages are not those of `BlockSplitter`.
        """
        stages = [stage for stage in self._own if isinstance(stage, BlockStage)]
        if not self.spans:
            raise ConfigurationError(
                "model_splitter",
                type(self._own[0]).__name__,
                "makes stages that are not those of BlockSplitter, and only those can be called as one model",
                "use BlockSplitter, or save the model and generate with one process",
            )
        model, place = self._built.model, self.place
        with (
            generators_of_rank_0(self._built.ranks.env),
            in_turn(model, stages, self.spans, place.layout, place.rank, self._channel),
            logits_of_one_rank(model, place.group, place.layout.last_rank),
        ):
            yield

    def log_entries(self) -> Mapping[str, object]:
        """Seconds that each rank has computed since the last call, and the share of time that they waited.

        Ranks begin a schedule together, and the one that is the last to end it tells how long it took.
        """
        gathered = self._built.ranks.gather(self._executor.timer.take())
        busy, whole = zip(*gathered, strict=True)
        bubble = 1 - sum(busy) / (len(busy) * max(whole)) if max(whole) > 0 else None
        return {"stage_seconds": list(busy), "bubble_share": bubble}

    def _buffers_outside(self) -> list[tuple[Tensor, bool]]:
        """Saved buffers outside of the blocks, and whether they come after them."""
        stage = self._own[0]
        if not self.spans or not isinstance(stage, BlockStage):
            return []
        after = {id(buffer) for module in stage.around[1] for buffer in module.buffers()}
        found = saved_buffers(self._built.model).items()
        return [
            (buffer, id(buffer) in after)
            for name, buffer in found
            if not name.startswith(f"{stage.row.path}.")
        ]


def _check_stages(model: nn.Module, stages: Sequence[nn.Module], layout: StageLayout) -> dict[str, list[int]]:
    """The stages that hold each parameter, by its name in the model.

    Raises:
        ConfigurationError: If they are not as many as they should be, or leave a parameter out.
    """
    if len(stages) != layout.num_stages:
        raise ConfigurationError(
            "model_splitter",
            len(stages),
            f"is the number of stages that it made, but {layout.num_stages} were asked for",
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


def _refuse_frozen_ranks(model: nn.Module, holders: Mapping[str, Sequence[int]], layout: StageLayout) -> None:
    """Refuse stages in which nothing is trained, unless nothing is trained at all."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    busy = {layout.rank_of(number) for name in trained for number in holders[name]}
    idle = sorted(set(range(layout.ranks)) - busy)
    if trained and idle:
        raise ConfigurationError(
            "model_init",
            type(model).__name__,
            f"leaves nothing to train in the stages {layout.stages_of(idle[0])}, so that their rank has "
            "nothing to do for the optimizer",
            "cut the model in another way (pipeline.layers_per_stage), use fewer ranks, or unfreeze some "
            "of their parameters",
        )
