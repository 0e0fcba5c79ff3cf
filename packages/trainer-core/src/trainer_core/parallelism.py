"""The one place where "how many devices, and how" enters the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from checkpoint_core import SharingPattern
from dist_env import DistributedEnvInterface

from .arguments import TrainingArguments
from .batch import Batch, labels_of, to_device
from .errors import ConfigurationError
from .loss import TokenLoss
from .precision import autocast

ModelInit = Callable[[], nn.Module]


class Parallelism(ABC):
    """What the loop asks of the devices; one subclass for each way to use them.

    The loop calls, in this order: `check`, `build`, then (after the optimizer exists) `wrap`; then
    `forward_backward` and `clip_grad_norm` for every step. Whatever two subclasses would both need is here.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        self.env = env
        self.model: nn.Module = nn.Identity()
        """The module to call, with all wrappers."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.env.device

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Number of ranks that work on different data."""

    @abstractmethod
    def check(self, args: TrainingArguments) -> None:
        """Refuse settings that this parallelism cannot honour, before any work.

        Raises:
            ConfigurationError: Naming the setting.
        """

    @abstractmethod
    def build(self, source: nn.Module | ModelInit, args: TrainingArguments) -> None:
        """Make the model, or this rank's part of it, ready on the device; sets `model`."""

    def wrap(self) -> None:
        """Wrap `model` once the optimizer exists; most parallelisms have nothing to do."""
        return

    @abstractmethod
    def unwrapped_model(self) -> nn.Module:
        """The user's module, without wrappers."""

    @abstractmethod
    def wrap_loader(self, loader: object) -> object:
        """Give each data-parallel rank its share of a loader's batches."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks, without waiting for the device."""

    @abstractmethod
    def gather(self, value: float) -> list[float]:
        """The value of every rank, in rank order, on every rank."""

    @abstractmethod
    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it; the same answer on every rank."""

    @abstractmethod
    def sharing(self) -> Mapping[str, SharingPattern]:
        """How each state component is shared: keys model, optimizer, scheduler, trainer, dataset, rng."""

    def process_groups(self) -> Mapping[str, ProcessGroup]:
        """Named process groups that state components refer to."""
        return {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer works on, under the model's own names."""
        return self.unwrapped_model().named_parameters()

    def forward(self, batch: Batch, loss: TokenLoss, args: TrainingArguments) -> Tensor:
        """Run the model on one batch.

        Returns:
            Sum of the token losses: float32 scalar on the device.
        """
        moved = to_device(batch, self.device)
        labels = labels_of(moved)
        inputs = {name: value for name, value in moved.items() if name != "labels"}
        with autocast(args, self.device.type):
            outputs = self.model(**inputs)
        return loss(logits_of(outputs), labels)

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, denominator: Tensor, last: bool
    ) -> Tensor:
        """Run one microbatch forward and backward.

        Args:
            batch: The microbatch.
            loss: Sum-and-count loss.
            args: Precision settings.
            denominator: Tokens that count in the whole optimizer step, over all ranks; at least 1.
            last: Whether this is the last microbatch before the optimizer step.

        Returns:
            Sum of the token losses of this microbatch, detached.
        """
        total = self.forward(batch, loss, args)
        torch.autograd.backward(total / denominator)
        return total.detach()

    def zero_grad(self) -> None:
        """Drop every gradient, also those of parameters that no optimizer steps."""
        self.unwrapped_model().zero_grad(set_to_none=True)

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Measure the gradient's 2-norm, and scale the gradient down to `max_norm` if it is longer.

        Returns:
            The norm before clipping: scalar on the device.
        """
        parameters = [p for p in self.unwrapped_model().parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        foreach = self.device.type != "cpu"
        norm = nn.utils.get_total_norm(gradients, foreach=foreach)
        if max_norm:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
        return norm


class SingleDevice(Parallelism):
    """One process, one device."""

    @property
    def data_parallel_size(self) -> int:
        """1."""
        return 1

    def check(self, args: TrainingArguments) -> None:
        """Refuse a job of several processes.

        Raises:
            ConfigurationError: If the world size is not 1.
        """
        if self.env.world_size != 1:
            raise ConfigurationError(
                "world_size",
                self.env.world_size,
                "Trainer runs on one device",
                "start one process, or use a trainer for several devices",
            )

    def build(self, source: nn.Module | ModelInit, args: TrainingArguments) -> None:
        """Build the model on the host, move it to the device, compile it if asked to."""
        model = source if isinstance(source, nn.Module) else source()
        self.model = model.to(self.device)
        compile_model(self.model, args)

    def unwrapped_model(self) -> nn.Module:
        """The model itself."""
        return self.model

    def wrap_loader(self, loader: object) -> object:
        """The loader itself."""
        return loader

    def sum(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def gather(self, value: float) -> list[float]:
        """The value alone."""
        return [value]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """The flags themselves."""
        return list(flags)

    def sharing(self) -> Mapping[str, SharingPattern]:
        """One copy of everything; generators belong to their rank."""
        keys = ("model", "optimizer", "scheduler", "trainer", "dataset")
        return {**dict.fromkeys(keys, SharingPattern.GLOBAL), "rng": SharingPattern.PER_RANK}


def compile_model(model: nn.Module, args: TrainingArguments) -> None:
    """Compile a module in place, so that its parameters keep their names."""
    if args.torch_compile:
        model.compile(
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode,
            dynamic=args.torch_compile_dynamic,
            fullgraph=args.torch_compile_full_graph,
        )


def logits_of(outputs: object) -> Tensor:
    """The logits in a model's output: a tensor, or an object or mapping with `logits`.

    Raises:
        ConfigurationError: If there are none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise ConfigurationError(
        "model",
        type(outputs).__name__,
        "returned neither a tensor nor an object with logits",
        "return logits",
    )
