"""Data parallelism with torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from checkpoint_core import StateComponent
from dist_env import DistributedEnvInterface
from trainer_core import (
    Batch,
    ConfigurationError,
    DataParallel,
    ModelSource,
    TokenLoss,
    Traffic,
    TrainingArguments,
    has_no_values,
    prepare_model,
    saved_buffers,
)

from .arguments import DDPTrainingArguments
from .checks import check_dry_run
from .compression import GradientCompression, build_compression
from .hosts import group_of_host
from .local import LocalUpdates
from .scoped import ScopedAverage, sum_without_values
from .weights import refuse_unequal_weights
from .wrapper import GradientWatch, wrap_model


class DDPParallelism(DataParallel):
    """Every rank holds the model; gradients are averaged, or the weights every few steps.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        super().__init__(env)
        self.traffic: Traffic = Traffic()
        self._args = DDPTrainingArguments()
        self._wrapped: DistributedDataParallel | None = None
        self._compression: GradientCompression | None = None
        self._local: LocalUpdates | None = None
        self._learns = False
        """Whether the wrapper is in its first step and learns a static graph, for which it has to reduce."""
        self._watch = GradientWatch()
        self._compares_weights = False
        """Whether it is still to be seen that all ranks have the same weights."""
        self._exchanged: list[Tensor] = []
        """What travels in a step without a word to anybody who counts."""

    def check(self, args: TrainingArguments) -> None:
        """Compare the arguments of the ranks; collective.

        Raises:
            ConfigurationError: If they are not for this trainer, or differ.
        """
        if not isinstance(args, DDPTrainingArguments):
            raise ConfigurationError(
                "args", type(args).__name__, "is not for DDPTrainer", "make a DDPTrainingArguments"
            )
        self._args = args
        super().check(args)

    def check_dry_run(self, args: TrainingArguments) -> None:
        """Refuse settings with which a step looks at values."""
        super().check_dry_run(args)
        if self.group is not None:
            check_dry_run(self._args)

    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Build the model on the device of each rank, and compare what was built."""
        self.model = prepare_model(source, args, self.device, weights_follow=weights_follow)
        self.agree_on_model()

    def wrap(self, optimizer: Optimizer | None) -> None:
        """Bring the weights of all ranks together, and wrap the model if it is trained."""
        trains = optimizer is not None and bool(self.parameters)
        if self.group is not None:
            self._share_weights(trains)
        host = group_of_host(self.env) if self._args.post_local_sgd.enabled else None
        self._local = self._local_updates(optimizer, host)
        if trains and self.group is not None:
            self._wrap_for_training(self.group, host)

    def begin(self, step: int) -> None:
        """Go to the phase that comes after so many optimizer steps."""
        if self._compression is not None:
            self._compression.begin(step)
        if self._local is not None:
            self._local.begin(step)
        if self._compares_weights and not (self._local is not None and self._local.replicas_differ):
            refuse_unequal_weights(self.model, self)
        self._compares_weights = False

    def after_step(self, step: int) -> None:
        """Bring the weights of all ranks together, if that is due."""
        if self._compression is not None:
            self._compression.begin(step)
        if self._local is not None:
            self._local.after_step(step)

    def unwrapped_model(self) -> nn.Module:
        """The model itself."""
        return self.model

    @property
    def trained_module(self) -> nn.Module:
        """The wrapper; the model itself where gradients stay on their rank."""
        return self.model if self._wrapped is None or self._scope == "none" else self._wrapped

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Run one microbatch forward and backward; gradients travel with the last one of a step."""
        # The wrapper averages over ranks what is to be summed.
        share = divisor / self.env.world_size
        wrapped = self.trained_module
        if not isinstance(wrapped, DistributedDataParallel):
            return super().forward_backward(batch, loss, args, divisor=share, last=last)
        travels = last or self._learns
        if last:
            self._watch.begin()
        with nullcontext() if travels else wrapped.no_sync():
            total = super().forward_backward(batch, loss, args, divisor=share, last=last)
        if travels:
            self.traffic.add(*self._exchanged)
        if last:
            self._learns = False
            self._watch.check()
        return total

    @contextmanager
    def consolidated(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which all ranks have one model: the mean where ranks step by themselves."""
        local = nullcontext() if self._local is None else self._local.consolidated(optimizer=optimizer)
        # In this order: what a rank sets aside as its own are its own buffers.
        with local, self.buffers_of_rank_0():
            yield

    def state_components(self) -> Sequence[StateComponent]:
        """What compression and local steps need to go on exactly."""
        owners = [owner for owner in (self._compression, self._local) if owner is not None]
        return [component for owner in owners for component in owner.state_components()]

    @property
    def _scope(self) -> str:
        """Which ranks average the gradients of the next step: all, node or none."""
        return "all" if self._local is None else self._local.gradient_scope

    def _share_weights(self, trains: bool) -> None:
        if not self._args.ddp.init_sync:
            self._compares_weights = True  # once those of a checkpoint are in place
        elif not trains:
            self.copy_weights_of_rank_0(self.model)  # the wrapper does so by itself

    def _local_updates(self, optimizer: Optimizer | None, host: ProcessGroup | None) -> LocalUpdates | None:
        args = self._args
        settings = args.post_local_sgd if args.post_local_sgd.enabled else args.diloco
        if not settings.enabled or optimizer is None:
            return None
        return LocalUpdates(
            settings,
            model=self.model,
            optimizer=optimizer,
            process_group=self.group,
            node_group=host,
            traffic=self.traffic,
        )

    def _wrap_for_training(self, group: ProcessGroup, host: ProcessGroup | None) -> None:
        settings = self._args.ddp
        self._wrapped = wrap_model(self.model, settings, group, self.device)
        self._learns = settings.static_graph
        self._compression = build_compression(self._args.compression, self.model, group, self.traffic)
        if self._compression is not None:
            self._compression.register(self._wrapped)
        elif host is not None and self._args.post_local_sgd.post_local_gradient_allreduce:
            scoped = ScopedAverage({"all": group, "node": host}, lambda: self._scope, self.traffic)
            self._wrapped.register_comm_hook(None, scoped.reduce)
        else:
            self._exchanged += self.parameters
            if has_no_values():
                self._wrapped.register_comm_hook(group, sum_without_values)
        if settings.broadcast_buffers:
            self._exchanged += saved_buffers(self.model).values()
        if not (settings.find_unused_parameters or settings.static_graph):
            trained = ((name, value) for name, value in self.named_parameters() if value.requires_grad)
            self._watch = GradientWatch(trained, self._args.gradient_accumulation_steps > 1)
