"""The one place where "how many devices, and how" enters the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from checkpoint_core import SharingPattern, StateComponent, load_model_weights
from dist_env import DistributedEnvInterface

from .arguments import TrainingArguments
from .batch import Batch, labels_of, to_device
from .errors import ConfigurationError
from .loss import FusedLossFactory, TokenLoss, loss_of, predict
from .memory import check_activation_offload
from .model import ModelSource, compile_model, prepare_model
from .optimization import clip_grad_norm
from .precision import autocast
from .traffic import Traffic


class Scored(NamedTuple):
    """A batch after the forward pass."""

    loss: Tensor
    """Sum of the token losses: float32 scalar on the device."""
    predictions: object
    """What the loss was computed from, usually logits [batch, sequence, vocabulary]."""
    labels: Tensor


class Parallelism(ABC):
    """What the loop asks of the devices; one subclass for each way to use them.

    It is called in this order: `check`, `agree`, `build`, `compile`, then (after the optimizer exists)
    `wrap`; `begin` when training begins or goes on; then `forward_backward`, `clip_grad_norm` and
    `after_step` for every step. Whatever two subclasses would both need is here.

    Args:
        env: Rank, world size and device of this process.
    """

    def __init__(self, env: DistributedEnvInterface) -> None:
        self.env = env
        self.model: nn.Module = nn.Identity()
        """The module to call."""
        self.traffic: Traffic | None = None
        """What this rank has sent for training; none where nothing is sent, or nobody counts."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.env.device

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Number of ranks that work on different data."""

    @property
    def counts_data(self) -> bool:
        """Whether what this rank counts of its data is added up; of ranks with the same data, one does."""
        return True

    @abstractmethod
    def check(self, args: TrainingArguments) -> None:
        """Refuse settings that this parallelism cannot honour, before any work.

        Raises:
            ConfigurationError: Naming the setting.
        """

    def check_dry_run(self, args: TrainingArguments) -> None:
        """Refuse settings with which a step looks at values, which a dry run does not have.

        Raises:
            ConfigurationError: Naming the setting.
        """
        if args.mixed_precision == "fp16":
            raise no_dry_run("mixed_precision", "fp16")

    @abstractmethod
    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Make the model, or this rank's part of it, ready on the device; sets `model`.

        Args:
            source: The module, or a function that makes it.
            args: How to make it.
            weights_follow: Whether a checkpoint will fill every weight, so that none need be drawn.
        """

    def compile(self, args: TrainingArguments) -> None:
        """Compile the model, as a whole or block by block, if asked to; in place, so that names stay."""
        compile_model(self.unwrapped_model(), args)

    def wrap(self, optimizer: Optimizer | None) -> None:
        """Wrap the model once the optimizer exists; most parallelisms have nothing to do.

        Args:
            optimizer: The optimizer; none for a run that does not train.
        """
        return

    def begin(self, step: int) -> None:
        """Note that training begins, or goes on, with so many optimizer steps done."""
        return

    def after_step(self, step: int) -> None:
        """Note that optimizer step number `step` was made; all ranks come here together."""
        return

    def consolidated(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which the model is the one that would be saved or scored; collective.

        It is another one than each rank trains only where ranks train models of their own.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        return nullcontext()

    def generating(self) -> AbstractContextManager[None]:
        """A context in which all ranks let the model write the same text; collective at each of its calls.

        It is more than nothing only where every rank has a part of the model.
        """
        return nullcontext()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to start where ranks were given different things; collective.

        Args:
            facts: What has to be the same everywhere, as plain values by name.

        Raises:
            ConfigurationError: On every rank, naming what differs and where.
        """
        return

    def fail_together(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if one of them has failed; collective.

        Args:
            error: What this rank has failed with, if so.
            what: What it could not do, for the message: 'load its train_dataset'.

        Raises:
            DataError: Naming the ranks that failed, and why.
        """
        if error is not None:
            raise error

    def guarded(self, doing: str) -> AbstractContextManager[None]:
        """A context in which the loss of another rank becomes an error that names it.

        Args:
            doing: What is done in it, for the message.
        """
        return nullcontext()

    def state_components(self) -> Sequence[StateComponent]:
        """What this parallelism saves beside the components of every run; restored after them."""
        return ()

    @abstractmethod
    def unwrapped_model(self) -> nn.Module:
        """The user's module, without wrappers."""

    def whole_model(self) -> nn.Module:
        """The model with all its parameters, to count them; they may have no storage.

        It is another one than `unwrapped_model` where a rank holds some of the layers only.
        """
        return self.unwrapped_model()

    def load_weights(self, directory: str | Path) -> None:
        """Fill the model, or this rank's part of it, from a directory in the Hugging Face layout.

        Raises:
            checkpoint_core.CheckpointError: If the weights are missing, damaged, or do not fit.
        """
        load_model_weights(self.unwrapped_model(), directory)

    def make_loss(
        self, args: TrainingArguments, given: TokenLoss | None, fused_factory: FusedLossFactory | None
    ) -> TokenLoss:
        """The loss of the run; asked for when the layers have been converted, and before compilation.

        Args:
            args: Label smoothing, z-loss and fused loss.
            given: The user's loss, which goes first.
            fused_factory: Makes a loss on hidden states from the output head.

        Raises:
            ConfigurationError: If settings contradict each other, or the loss cannot be fused with the model.
        """
        return loss_of(args, self.unwrapped_model(), given, fused_factory)

    def figures(self) -> Mapping[str, object]:
        """Further entries for the log, about the time since the last call; collective."""
        return {}

    @abstractmethod
    def wrap_loader(self, loader: object) -> object:
        """Give each data-parallel rank its share of the batches of training data."""

    def wrap_evaluation_loader(self, loader: object) -> object:
        """Give each data-parallel rank its share of the batches of evaluation data.

        Every rank gets equally many. `last_is_dummy` of what is returned, if it has that, tells that the last
        batch only keeps a rank company with others that still have data.
        """
        return self.wrap_loader(loader)

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks whose data counts, without waiting for the device."""

    @abstractmethod
    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, in rank order, on every rank; each rank gives equally many."""

    @abstractmethod
    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has raised it; the same answer on every rank."""

    @abstractmethod
    def sharing(self) -> Mapping[str, SharingPattern]:
        """How each state component is shared: keys model, optimizer, scheduler, grad_scaler,
        callbacks, trainer, dataset, rng."""

    def process_groups(self) -> Mapping[str, ProcessGroup]:
        """Named process groups that state components refer to."""
        return {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer works on, under the model's own names."""
        return self.unwrapped_model().named_parameters()

    @property
    def trained_module(self) -> nn.Module:
        """The module to call in training, with all wrappers."""
        return self.model

    def forward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, module: nn.Module | None = None
    ) -> Scored | None:
        """Run the model on one batch and score it.

        Args:
            batch: The batch.
            loss: Sum-and-count loss.
            args: Precision settings.
            module: What to call; `model` otherwise.

        Returns:
            The scores; None on a rank that does not hold the end of the model.
        """
        return self._scored(batch, loss, args, module or self.model)

    def _scored(self, batch: Batch, loss: TokenLoss, args: TrainingArguments, module: nn.Module) -> Scored:
        inputs = to_device(batch, self.device)
        labels = labels_of(inputs)
        del inputs["labels"]
        with autocast(args, self.device.type):
            predictions = predict(loss, module, inputs, labels)
        return Scored(loss(predictions, labels), predictions, labels)

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Run one microbatch forward and backward.

        Args:
            batch: The microbatch.
            loss: Sum-and-count loss.
            args: Precision settings.
            divisor: What the sum of the losses is divided by before the backward pass: the tokens that count
                in the whole optimizer step over all ranks, at least 1, over the scale of the gradients.
            last: Whether this is the last microbatch before the optimizer step.

        Returns:
            Sum of the token losses of this microbatch, detached.
        """
        total = self._scored(batch, loss, args, self.trained_module).loss
        (total / divisor).backward()  # type: ignore[no-untyped-call]
        return total.detach()

    def zero_grad(self) -> None:
        """Drop every gradient, also those of parameters that no optimizer steps."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Measure the gradient's 2-norm, and scale the gradient down to `max_norm` if it is longer.

        Returns:
            The norm before clipping: scalar on the device.
        """
        return clip_grad_norm(self.parameters, max_norm)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def evaluation_settings(self) -> str:
        """Settings that decide how ranks share evaluation data, for a message: ', name=value'."""
        return ""


def no_dry_run(setting: str, value: object) -> ConfigurationError:
    """The error for a setting that a dry run cannot follow."""
    return ConfigurationError(
        setting, value, "looks at values of tensors, and a dry run has none", "leave it out of the dry run"
    )


def check_device_settings(args: TrainingArguments, device: torch.device) -> None:
    """Refuse settings that the device of this process cannot honour.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if args.enable_activation_offloading:
        check_activation_offload(device)


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
        check_device_settings(args, self.device)
        if self.env.world_size != 1:
            raise ConfigurationError(
                "world_size",
                self.env.world_size,
                "Trainer runs on one device",
                "start one process, or use a trainer for several devices",
            )

    def build(self, source: ModelSource, args: TrainingArguments, *, weights_follow: bool) -> None:
        """Build and convert the model on the device."""
        self.model = prepare_model(source, args, self.device, weights_follow=weights_follow)

    def unwrapped_model(self) -> nn.Module:
        """The model itself."""
        return self.model

    def forward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, module: nn.Module | None = None
    ) -> Scored:
        """Run the model on one batch and score it."""
        return self._scored(batch, loss, args, module or self.model)

    def wrap_loader(self, loader: object) -> object:
        """The loader itself."""
        return loader

    def sum(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values alone."""
        return [list(values)]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """The flags themselves."""
        return list(flags)

    def sharing(self) -> Mapping[str, SharingPattern]:
        """One copy of everything; generators belong to their rank."""
        keys = ("model", "optimizer", "scheduler", "grad_scaler", "callbacks", "trainer", "dataset")
        return {**dict.fromkeys(keys, SharingPattern.GLOBAL), "rng": SharingPattern.PER_RANK}
