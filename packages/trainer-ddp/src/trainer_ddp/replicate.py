"""Every rank holds the model: gradients are averaged by torch's wrapper, or the weights every few steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from checkpoint_core import StateComponent
from dist_env import ParallelLayout
from trainer_core import (
    BuiltModel,
    CommBytes,
    ConfigurationError,
    GradSync,
    ModelTransform,
    Ranks,
    ReplicateGradients,
    StepHooks,
    Trainer,
    TrainingArguments,
    copy_weights_of_rank_0,
    is_fake,
    saved_buffers,
)

from .arguments import (
    CompressionArguments,
    DDPArguments,
    DDPTrainingArguments,
    DiLoCoArguments,
    PostLocalSGDArguments,
    check_beside,
    check_dry_run,
)
from .comm_hooks import GroupAverageHook, node_group, sum_fake
from .compression import GradientCompression, build_compression
from .local_updates import LocalUpdates
from .wrapper import GradientWatch, wrap_model


class Replicate(ReplicateGradients):
    """Ranks of the dimension `replicate` hold the same weights and work on different data.

    A whole model is wrapped by torch's DDP, which averages gradients while the backward pass continues; or
    gradients travel compressed, or ranks step by themselves for a while. In a pipeline the gradients of each
    stage are summed when it has computed its last microbatch, and none of these modes is available.

    Args:
        ddp: Options of torch's wrapper. This and the others: those of the run's arguments if they have them,
            else the defaults.
        compression: How gradients are made smaller before they travel.
        post_local_sgd: Local steps with averaged weights.
        diloco: Local steps with an outer optimizer.
    """

    axis: ClassVar[str] = "replicate"

    def __init__(
        self,
        ddp: DDPArguments | None = None,
        *,
        compression: CompressionArguments | None = None,
        post_local_sgd: PostLocalSGDArguments | None = None,
        diloco: DiLoCoArguments | None = None,
    ) -> None:
        self.ddp: DDPArguments = ddp or DDPArguments()
        self.compression: CompressionArguments = compression or CompressionArguments()
        self.post_local_sgd: PostLocalSGDArguments = post_local_sgd or PostLocalSGDArguments()
        self.diloco: DiLoCoArguments = diloco or DiLoCoArguments()
        given = {"ddp": ddp, "compression": compression, "post_local_sgd": post_local_sgd, "diloco": diloco}
        self._left_to_args = [name for name, settings in given.items() if settings is None]
        self._several = False

    def is_active(self, layout: ParallelLayout) -> bool:
        """Unless replicas are summed by what shards the weights within each of them."""
        return not layout.shards_weights

    def check(self, args: TrainingArguments, ranks: Ranks) -> None:
        """Refuse settings that do not go together, or with the layout.

        Raises:
            ConfigurationError: Naming the setting.
        """
        if isinstance(args, DDPTrainingArguments):
            for name in self._left_to_args:
                setattr(self, name, getattr(args, name))
        check_beside(args, self)
        self._several = ranks.several
        if ranks.env.world_size == ranks.layout.replicate:
            return
        for name in ("ddp", "compression", "post_local_sgd", "diloco"):
            settings = getattr(self, name)
            for each in fields(settings):
                if getattr(settings, each.name) != each.default:
                    raise ConfigurationError(
                        f"{name}.{each.name}",
                        getattr(settings, each.name),
                        f"needs a whole model on each rank, but the layout is {ranks.layout}",
                        "leave it out, or give all ranks to the dimension dp",
                    )

    def check_dry_run(self, args: TrainingArguments) -> None:
        """Refuse settings with which a step reads values of tensors."""
        if self._several:
            check_dry_run(self)

    def plan_notes(self, args: TrainingArguments, layout: ParallelLayout) -> Sequence[str]:
        """What the buckets take."""
        if layout.world_size > layout.replicate:
            return super().plan_notes(args, layout)
        if self.ddp.gradient_as_bucket_view:
            return ()
        return (
            "gradients under way are the buckets in which replicas sum them; ddp.gradient_as_bucket_view "
            "does without",
        )

    def apply(self, built: BuiltModel) -> None:
        """Have the gradients of the model, or of each stage, summed over its replicas."""
        ranks = built.ranks
        # They need not be part of the arguments, which are compared.
        names = ("ddp", "compression", "post_local_sgd", "diloco")
        ranks.check_same({name: asdict(getattr(self, name)) for name in names})
        if ranks.env.world_size > ranks.layout.replicate:
            super().apply(built)
            return
        built.traffic = CommBytes()
        replicas = _Replicas(built, self, ranks.data_group, built.traffic)
        built.grad_sync = replicas.sync
        built.hooks.append(replicas)


class DDPTrainer(Trainer):
    """Trains a model that every rank holds, on data that the ranks share.

    The curve is that of one process with the same global batch: per_device_train_batch_size times
    gradient_accumulation_steps times ranks. With one rank it is `trainer_core.Trainer`. Making it compares
    the arguments of all ranks, so all ranks make it together. It takes what `Trainer` takes; the arguments
    are `DDPTrainingArguments`, or a dict of them.

    Raises:
        ConfigurationError: For arguments that cannot be used, or that differ between ranks, before any work.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = DDPTrainingArguments

    def preset(self) -> list[ModelTransform]:
        """Replicates the model over the dimension `replicate`: all ranks, unless `mesh` says otherwise.

        Raises:
            ConfigurationError: If the arguments are not for this trainer.
        """
        args = self.args
        if not isinstance(args, DDPTrainingArguments):
            raise ConfigurationError(
                "args",
                type(args).__name__,
                "is not the arguments class of DDPTrainer",
                "pass a DDPTrainingArguments",
            )
        return [
            Replicate(
                args.ddp,
                compression=args.compression,
                post_local_sgd=args.post_local_sgd,
                diloco=args.diloco,
            )
        ]


class _WrapperSync(GradSync):
    """Gradients travel with the last backward pass of a step, through torch's wrapper.

    Args:
        replicas: Ranks whose gradients are averaged.
        traffic: Counts what the wrapper sends by itself.
    """

    def __init__(self, replicas: int, traffic: CommBytes) -> None:
        # The wrapper averages over ranks what is to be summed.
        self.mean_over = replicas
        self.wrapped: DistributedDataParallel | None = None
        self.watch = GradientWatch()
        self.local: LocalUpdates | None = None
        self.exchanged: list[Tensor] = []
        """Tensors that the wrapper communicates itself, counted here."""
        self.learns = False
        """Whether the wrapper is in its first step and learns a static graph, for which it has to reduce."""
        self._traffic = traffic
        self._no_sync: AbstractContextManager[None] = nullcontext()

    @property
    def scope(self) -> Literal["all", "node", "none"]:
        """Which ranks average the gradients of the next step."""
        return "all" if self.local is None else self.local.gradient_scope

    def module(self, part: nn.Module) -> nn.Module:
        """The wrapper; the model itself where gradients stay on their rank."""
        return part if self.wrapped is None or self.scope == "none" else self.wrapped

    def before_backward(self, part: nn.Module, *, last: bool) -> None:
        """Hold gradients back until the last microbatch."""
        if self.wrapped is None or self.scope == "none":
            return
        if last:
            self.watch.begin()
        self._no_sync = nullcontext() if last or self.learns else self.wrapped.no_sync()
        self._no_sync.__enter__()

    def after_backward(self, part: nn.Module, *, last: bool) -> None:
        """Count what has travelled, and see that every parameter has its gradient."""
        if self.wrapped is None or self.scope == "none":
            return
        self._no_sync.__exit__(None, None, None)
        if last or self.learns:
            self._traffic.add(*self.exchanged)
        if last:
            self.learns = False
            self.watch.check()


class _Replicas(StepHooks):
    """Wraps the model once the optimizer exists, and brings the weights of ranks together when it is time."""

    def __init__(
        self, built: BuiltModel, modes: Replicate, group: ProcessGroup | None, traffic: CommBytes
    ) -> None:
        self.sync = _WrapperSync(built.ranks.layout.replicate, traffic)
        self._built = built
        self._modes = modes
        self._group = group
        self._traffic = traffic
        self._compression: GradientCompression | None = None
        self._local: LocalUpdates | None = None
        self._compares_weights = False
        """Whether it is still to be seen that all ranks have the same weights."""

    def attach(self, optimizer: Optimizer | None) -> None:
        """Bring the weights of all ranks together, and wrap the model if it is trained."""
        trains = optimizer is not None and bool(self._built.parameters)
        if self._group is not None:
            if not self._modes.ddp.init_sync:
                self._compares_weights = True  # once those of a checkpoint are in place
            elif not trains:
                copy_weights_of_rank_0(self._built.model, self._group)  # the wrapper does so by itself
        sgd = self._modes.post_local_sgd
        host = node_group(self._built.ranks.env) if sgd.enabled else None
        self._local = self.sync.local = self._local_updates(optimizer, host)
        if trains and self._group is not None:
            self._wrap(self._group, host)

    def begin(self, step: int) -> None:
        """Go to the phase that comes after so many optimizer steps."""
        if self.sync.wrapped is not None:
            self.sync.wrapped.train()
        if self._compression is not None:
            self._compression.begin(step)
        if self._local is not None:
            self._local.begin(step)
        if self._compares_weights and not (self._local is not None and self._local.replicas_differ):
            _refuse_unequal_weights(self._built.model, self._built.ranks)
        self._compares_weights = False

    def after_step(self, step: int) -> None:
        """Bring the weights of all ranks together, if that is due."""
        if self._compression is not None:
            self._compression.begin(step)
        if self._local is not None:
            self._local.after_step(step)

    @contextmanager
    def synced_weights(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which all ranks have one model: the mean where ranks step by themselves."""
        with nullcontext() if self._local is None else self._local.synced_weights(optimizer=optimizer):
            yield

    def state_components(self) -> Sequence[StateComponent]:
        """What compression and local steps need to continue exactly."""
        owners = [owner for owner in (self._compression, self._local) if owner is not None]
        return [component for owner in owners for component in owner.state_components()]

    def _local_updates(self, optimizer: Optimizer | None, host: ProcessGroup | None) -> LocalUpdates | None:
        modes = self._modes
        settings = modes.post_local_sgd if modes.post_local_sgd.enabled else modes.diloco
        if not settings.enabled or optimizer is None:
            return None
        if self._built.average is not None:
            raise ConfigurationError(
                "optimizer",
                type(optimizer).__name__,
                "averages weights, and with post_local_sgd or diloco each rank has weights of its own",
                "use another optimizer, or leave the local steps out",
            )
        return LocalUpdates(
            settings,
            model=self._built.model,
            optimizer=optimizer,
            process_group=self._group,
            node_group=host,
            traffic=self._traffic,
        )

    def _wrap(self, group: ProcessGroup, host: ProcessGroup | None) -> None:
        modes, built, sync = self._modes, self._built, self.sync
        sync.wrapped = wrap_model(built.model, modes.ddp, group, built.ranks.device)
        sync.learns = modes.ddp.static_graph
        self._compression = build_compression(modes.compression, built.model, group, self._traffic)
        if self._compression is not None:
            self._compression.register(sync.wrapped)
        elif host is not None and modes.post_local_sgd.post_local_gradient_allreduce:
            scoped = GroupAverageHook({"all": group, "node": host}, lambda: sync.scope, self._traffic)
            sync.wrapped.register_comm_hook(None, scoped.reduce)
        else:
            sync.exchanged += built.parameters
            if is_fake():
                sync.wrapped.register_comm_hook(group, sum_fake)
        if modes.ddp.broadcast_buffers:
            sync.exchanged += saved_buffers(built.model).values()
        if not (modes.ddp.find_unused_parameters or modes.ddp.static_graph):
            trained = ((name, value) for name, value in built.named_parameters() if value.requires_grad)
            sync.watch = GradientWatch(trained, built.args.gradient_accumulation_steps > 1)


@torch.no_grad()
def _refuse_unequal_weights(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to start where ranks have different weights; collective.

    Sums of each parameter and of its squares are compared, in float64.

    Raises:
        ConfigurationError: On every rank, naming the first parameter that differs.
    """
    named = list(model.named_parameters())
    if not named:
        return
    sums = [torch.stack([value.double().sum(), value.double().square().sum()]) for _, value in named]
    pairs = torch.stack(sums).tolist()
    ranks.check_same(
        {
            f"sums of the weights {name} (ddp.init_sync is off)": tuple(pair)
            for (name, _), pair in zip(named, pairs, strict=True)
        }
    )
