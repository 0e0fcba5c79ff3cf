"""Data parallelism with torch's wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dist_env import DistributedEnvInterface
from trainer_core import (
    Batch,
    ConfigurationError,
    DataParallel,
    ModelSource,
    TokenLoss,
    Traffic,
    TrainingArguments,
    prepare_model,
)

from .arguments import DDPTrainingArguments
from .buffers import buffers_of_rank_0
from .weights import copy_weights_of_rank_0, refuse_unequal_weights
from .wrapper import refuse_missing_gradients, wrap_model


class DDPParallelism(DataParallel):
    """Every rank holds the model, and gradients are averaged.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        super().__init__(env)
        self.traffic: Traffic = Traffic()
        self._args = DDPTrainingArguments()
        self._wrapped: DistributedDataParallel | None = None
        self._watched: list[tuple[str, nn.Parameter]] = []
        self._exchanged: list[Tensor] = []

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

    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Build the model on the device of each rank, and compare what was built."""
        self.model = prepare_model(source, args, self.device, weights_follow=weights_follow)
        self.agree_on_model()

    def wrap(self, optimizer: Optimizer | None) -> None:
        """Bring the weights of all ranks together, and wrap the model if it is trained."""
        settings = self._args.ddp
        if self.group is None:
            return
        if not settings.init_sync:
            refuse_unequal_weights(self.model, self)
        elif optimizer is None or not self.parameters:
            copy_weights_of_rank_0(self.model, self.group)
        if optimizer is None or not self.parameters:
            return
        self._wrapped = wrap_model(self.model, settings, self.group, self.device)
        self._exchanged = list(self.parameters)
        if settings.broadcast_buffers:
            self._exchanged += self.model.buffers()
        if not (settings.find_unused_parameters or settings.static_graph):
            self._watched = [(name, value) for name, value in self.named_parameters() if value.requires_grad]

    def unwrapped_model(self) -> nn.Module:
        """The model itself."""
        return self.model

    @property
    def trained_module(self) -> nn.Module:
        """The wrapper; the model itself with one rank."""
        return self.model if self._wrapped is None else self._wrapped

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Run one microbatch forward and backward; gradients travel with the last one of a step."""
        # The wrapper averages over ranks what is to be summed.
        share = divisor / self.env.world_size
        if self._wrapped is None or last:
            total = super().forward_backward(batch, loss, args, divisor=share, last=last)
        else:
            with self._wrapped.no_sync():
                return super().forward_backward(batch, loss, args, divisor=share, last=last)
        if self._wrapped is not None:
            refuse_missing_gradients(self._watched)
            self.traffic.add(*self._exchanged)
        return total

    def consolidated(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which all ranks have the buffers of rank 0; collective."""
        return buffers_of_rank_0(self.model, self.group)
