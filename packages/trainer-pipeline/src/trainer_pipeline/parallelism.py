"""Layers of the model on different ranks, through which microbatches go one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from checkpoint_core import SharingPattern, load_model_weights
from dist_env import DistributedEnvInterface, gather_objects
from trainer_core import (
    DATA_PARALLEL,
    Batch,
    CausalLMLoss,
    ConfigurationError,
    DataParallel,
    FusedLossFactory,
    ModelSource,
    Scored,
    TokenLoss,
    TrainingArguments,
    clip_grad_norm,
    compile_model,
    generators_of_rank_0,
    labels_of,
    logits_of_one_rank,
    loss_of,
    prepare_model,
    share_generators,
    to_device,
)

from .arguments import PipelineTrainingArguments
from .blocks import BlockStage
from .boundaries import Boundaries
from .buffers import buffers_of_their_stages
from .building import Built, build_stages
from .checks import check_layout, check_schedule
from .clock import Clock
from .execution import Execution, Place
from .generation import in_turn
from .gradients import Copies, HeldCopies, NoCopies, ShardedCopies
from .layout import Layout
from .microbatches import cut, join
from .relay import Relay
from .runner import Feed
from .schedules import ScheduleFactory, ScheduleKind, kind_of_factory, schedule_kind
from .splitting import BlockSplitter, ModelSplitter
from .ties import SharedWeights, own_group, shared_weights

PIPELINE_PARALLEL = "pipeline_parallel"
"""The dimension of the mesh along which ranks have different layers."""


class PipelineParallelism(DataParallel):
    """Every rank has some layers of the model.

    With one rank it is one process.

    Args:
        env: Rank, world size and device of this process.
        splitter: Cuts the model; by its row of blocks otherwise.
        schedule: A schedule class of torch, instead of a name in the arguments.
    """

    def __init__(
        self,
        env: DistributedEnvInterface,
        splitter: ModelSplitter | None = None,
        schedule: ScheduleFactory | None = None,
    ) -> None:
        super().__init__(env)
        self._given_kind = None if schedule is None else kind_of_factory(schedule)
        self._splitter = splitter
        self._args = PipelineTrainingArguments()
        self._layout = Layout(1, 1, "loop")
        self._built: Built | None = None
        self._execution: Execution | None = None
        self._relay: Relay | None = None
        self._ties = SharedWeights({}, {}, set())
        self._copies: Copies = NoCopies()
        self.boundaries = Boundaries()
        """What is known of the hidden states between stages."""
        self.clock = Clock(env.device)
        """Tells how long this rank computes."""
        self._feed: Feed | None = None

    @property
    def kind(self) -> ScheduleKind:
        """The schedule."""
        return self._given_kind or schedule_kind(self._args.pipeline.schedule)

    @property
    def data_parallel_size(self) -> int:
        """The number of copies of the pipeline."""
        return self._args.pipeline.replicas

    @cached_property
    def pipeline_group(self) -> ProcessGroup | None:
        """The ranks of this rank's pipeline, in order; none with one rank."""
        return None if self.mesh is None else self.mesh.get_group(PIPELINE_PARALLEL)

    @property
    def pipeline_rank(self) -> int:
        """The place of this rank in its pipeline."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(PIPELINE_PARALLEL)

    @property
    def has_end(self) -> bool:
        """Whether this rank has the last stage, where the loss is computed."""
        return self.pipeline_rank == self._layout.last_rank

    @property
    def counts_data(self) -> bool:
        """Of the ranks of a pipeline, which have the same data, the one with the last stage."""
        return self.has_end

    def check(self, args: TrainingArguments) -> None:
        """Compare the arguments of the ranks; collective.

        Raises:
            ConfigurationError: If they are not for this trainer, do not fit the ranks, or differ.
        """
        if not isinstance(args, PipelineTrainingArguments):
            raise ConfigurationError(
                "args", type(args).__name__, "is not for PipelineTrainer", "make a PipelineTrainingArguments"
            )
        self._args = args
        if self.env.world_size > 1:
            check_schedule(args, self.kind)
            self._layout = check_layout(args, self.kind, self.env.world_size)
        super().check(args)
        if self.mesh is not None:
            self.agree({"schedule": self.kind.name})
            self._connect()

    def make_mesh(self) -> DeviceMesh:
        """Pipelines side by side: neighbouring ranks have the same stages."""
        shape = (self._layout.ranks, self._args.pipeline.replicas)
        return init_device_mesh(
            self.env.device_type, shape, mesh_dim_names=(PIPELINE_PARALLEL, DATA_PARALLEL)
        )

    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Build this rank's stages, with the values that one process would have drawn."""
        if self.mesh is None or self._relay is None:
            self.model = prepare_model(source, args, self.device, weights_follow=weights_follow)
            return
        share_generators(self.env)  # without a seed each rank would draw a model of its own
        built, sums = build_stages(
            source,
            self._args,
            self.device,
            self._layout,
            self.pipeline_rank,
            self._splitter or self._default_splitter(),
            self.mesh[DATA_PARALLEL] if self._args.pipeline.shard_replicas else None,
            draw=not (weights_follow and args.construct_model_on == "meta"),
            agree=self._agree_on,
        )
        self._built, self.model = built, built.model
        if built.row is not None:
            built.model.register_forward_pre_hook(built.row.refuse_call)
        self._compare_values(sums)
        self._ties = shared_weights(built, self.mesh, self.pipeline_rank)
        if self._args.pipeline.shard_replicas:
            self._copies = ShardedCopies(built.stages)
        elif self._args.pipeline.replicas > 1 and self.group is not None:
            self._copies = HeldCopies(built.stages, self.group)

    def make_loss(
        self, args: TrainingArguments, given: TokenLoss | None, fused_factory: FusedLossFactory | None
    ) -> TokenLoss:
        """The loss of the run; ranks without the end of the model only count with it."""
        if self._built is None or self.has_end:
            return super().make_loss(args, given, fused_factory)
        return loss_of(replace(args, fused_loss="no"), self._built.outline, given, fused_factory)

    def compile(self, args: TrainingArguments) -> None:
        """Compile each block: a stage is a part of the model's forward, and no module of its own."""
        if self._built is None or self._built.row is None:
            super().compile(args)
            return
        if args.torch_compile:
            compile_model(
                self.model,
                replace(args, torch_compile_scope="blocks", transformer_layers_path=self._built.row.path),
            )

    def wrap(self, optimizer: Optimizer | None) -> None:
        """Connect the stages, once everything about them has been decided."""
        if self._built is None or self._relay is None or self.pipeline_group is None:
            return
        self._feed = Feed(self._args, CausalLMLoss())
        place = Place(self._layout, self.pipeline_rank, self.pipeline_group, self.device, self.env)
        self._execution = Execution(
            place,
            self.kind,
            self._args.pipeline.n_microbatches,
            self._built.stages,
            self.model,
            self._feed,
            self._relay,
            self.clock,
            self._copies,
            self.boundaries,
        )
        if optimizer is not None:
            self._execution.check()

    def unwrapped_model(self) -> nn.Module:
        """The model, of which this rank has some parameters."""
        return self.model

    def whole_model(self) -> nn.Module:
        """The model with all its parameters, without values."""
        return self.model if self._built is None else self._built.outline

    def load_weights(self, directory: str | Path) -> None:
        """Fill what this rank has of the model from a directory in the Hugging Face layout."""
        elsewhere = set(self.whole_model().state_dict())
        load_model_weights(self.unwrapped_model(), directory, elsewhere=elsewhere)

    def forward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, module: nn.Module | None = None
    ) -> Scored | None:
        """Take a batch through the stages, forward only; collective in the pipeline.

        Returns:
            The scores; None on ranks without the last stage. Predictions that are neither a tensor nor a
            mapping of tensors come as a list, those of each microbatch.
        """
        if self._execution is None or self._feed is None:
            return super().forward(batch, loss, args, module)
        inputs = to_device(batch, self.device)
        self._feed.fill(loss, cut(inputs, self._args.pipeline.n_microbatches))
        losses: list[Tensor] = []
        predictions: list[object] = []

        def note(total: Tensor, predicted: object) -> None:
            losses.append(total)
            predictions.append(predicted)

        try:
            self._execution.score(note)
        finally:
            self._feed.empty()
        if not losses:
            return None
        labels = labels_of(inputs)
        return Scored(torch.stack(losses).sum(), join(predictions, len(labels)), labels)

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Take a batch through the pipeline, forward and backward; collective in the pipeline.

        Returns:
            Sum of the token losses of the batch, on every rank.
        """
        if self._execution is None or self._feed is None or self._built is None:
            return super().forward_backward(batch, loss, args, divisor=divisor, last=last)
        self._feed.fill(loss, cut(to_device(batch, self.device), self._args.pipeline.n_microbatches), divisor)
        total = torch.zeros((), device=self.device)
        try:
            self._execution.train(last=last)
            if self._feed.losses:
                total = torch.stack(self._feed.losses).sum()
        finally:
            self._feed.empty()
        if last:
            self._ties.add_up()
        dist.broadcast(total, group=self.pipeline_group, group_src=self._layout.last_rank)
        return total

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Measure the norm over all stages, and scale the gradient down if it is longer."""
        if self._built is None:
            return super().clip_grad_norm(max_norm)
        copies = self._ties.copies
        uncounted = {id(parameter) for parameter in copies}
        counted = [parameter for parameter in self.parameters if id(parameter) not in uncounted]
        norm = clip_grad_norm(counted, max_norm, over_ranks=self._sum_over_stages, uncounted=copies)
        return norm.to(self.device)

    @contextmanager
    def consolidated(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which each rank holds what it saves: common buffers, and no more than its weights."""
        if self._built is None or self.pipeline_group is None:
            yield
            return
        self._drop_gathered()
        try:
            with (
                self.buffers_of_rank_0(),
                buffers_of_their_stages(self._built, self.pipeline_group, self._layout.last_rank),
            ):
                yield
        finally:
            self._drop_gathered()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context in which all ranks call the model alike, and get the same logits; collective."""
        built, relay = self._built, self._relay
        if built is None or relay is None:
            yield
            return
        if built.row is None:
            raise ConfigurationError(
                "model_splitter",
                type(self._splitter).__name__,
                "makes stages that are not those of BlockSplitter, and only those can be called as one model",
                "use BlockSplitter, or save the model and generate with one process",
            )
        stages = [stage for stage in built.stages.values() if isinstance(stage, BlockStage)]
        turn = in_turn(built.model, stages, built.spans, self._layout, self.pipeline_rank, relay)
        source = self._layout.last_rank
        with (
            generators_of_rank_0(self.env),
            turn,
            logits_of_one_rank(built.model, self.pipeline_group, source),
        ):
            yield
        self._drop_gathered()

    def sharing(self) -> Mapping[str, SharingPattern]:
        """Model and optimizer lie on the ranks in parts; one rank reads the data for all."""
        parts = SharingPattern.REPLICATED if self.mesh is None else SharingPattern.SHARDED
        return {**super().sharing(), "model": parts, "optimizer": parts}

    def figures(self) -> Mapping[str, object]:
        """Seconds that each rank has computed since the last call, and the share of time that they waited.

        Ranks begin a step together, and the one that is the last to end it tells how long it took.
        """
        if self._built is None:
            return {}
        busy, whole = zip(*self.gather(self.clock.take()), strict=True)
        bubble = 1 - sum(busy) / (len(busy) * max(whole)) if max(whole) > 0 else None
        return {"stage_seconds": list(busy), "bubble_share": bubble}

    def _default_splitter(self) -> ModelSplitter:
        pipeline = self._args.pipeline
        return BlockSplitter(self._args.transformer_layers_path, pipeline.balance, pipeline.layers_per_stage)

    def _agree_on(self, model: nn.Module) -> None:
        self.model = model
        self.agree_on_model()

    def _compare_values(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Refuse to start where copies of a stage, or of a shared weight, begin with different values."""
        # To six digits: processors of different kinds may add up in another order.
        mine = {name: f"{total:.6g}, {squares:.6g}" for name, (total, squares) in sums.items()}
        told = gather_objects(mine, self.env)
        for name in dict.fromkeys(name for each in told for name in each):
            seen = {each[name] for each in told if name in each}
            if len(seen) > 1:
                raise ConfigurationError(
                    "model_init",
                    name,
                    f"gives this parameter different values on ranks that both have it: {sorted(seen)} "
                    "(sum and sum of squares)",
                    "draw weights from torch's generators only, and set the same seed everywhere",
                )

    def _connect(self) -> None:
        """Make the groups that the ranks need beside the mesh; collective."""
        up = self.pipeline_group
        if self.mesh is None:
            return
        with self.guarded("connecting the stages"):
            down = own_group(self.mesh.mesh.T.tolist())
        if up is not None and down is not None:
            self._relay = Relay(self._layout, self.pipeline_rank, up, down, self.device)

    def _sum_over_stages(self, value: Tensor) -> Tensor:
        """Add up over the ranks; all copies have the same gradients, unless each has a part of them."""
        pipeline = self._args.pipeline
        return self.sum_over_all(value) / (1 if pipeline.shard_replicas else pipeline.replicas)

    def _drop_gathered(self) -> None:
        if isinstance(self._copies, ShardedCopies):
            self._copies.drop()
