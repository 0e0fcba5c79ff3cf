"""Build what a rank would build and make a step, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dist_env import StaticDistributedEnvironment

from .arguments import TrainingArguments
from .build import build_model_and_loss, build_optimizer_of, build_scheduler, samples_per_step
from .data.batch import Batch, Window, next_window, row_length
from .data.loaders import train_loader
from .distributed.clipping import own_part
from .distributed.ranks import BatchPlacement, Ranks
from .distributed.transforms import BuiltModel, ModelTransform
from .errors import ConfigurationError, DataError
from .inputs import TrainerInputs
from .loss import TokenLoss
from .metrics.comm_bytes import Collective, CollectiveWatch
from .metrics.throughput import FlopsAccount
from .model import fake_tensors, ordinary_tensors, run_settings
from .periodic import set_length
from .state import fresh_state
from .update import Update, build_update


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one rank would hold and do, in bytes where nothing else is said."""

    parameters: int
    """Number of parameters of the whole model, tied ones once."""
    weights: int
    """What this rank holds of the parameters that are trained or frozen."""
    gradients: int
    """What it holds of the gradients when it steps the optimizer."""
    optimizer: int
    """What it holds of the optimizer's state."""
    optimizer_name: str
    """Class of the optimizer."""
    rows: int
    """Examples of one optimizer step, over all ranks."""
    row_length: int
    """Positions of an example."""
    flops: float | None
    """Model FLOPs of an optimizer step over all ranks, forward and backward; None if they cannot be told."""
    executed_flops: float | None
    """The same with what is recomputed; None if that is not known."""
    collectives: tuple[Collective, ...]
    """What this rank asks of the others in an optimizer step, the first one."""
    left_out: tuple[str, ...]
    """What training would do and this did not."""

    @property
    def tokens(self) -> int:
        """Positions of one optimizer step, over all ranks."""
        return self.rows * self.row_length


def dry_run(
    args: TrainingArguments, ranks: Ranks, transforms: Sequence[ModelTransform], parts: TrainerInputs
) -> DryRun:
    """Build model and optimizer of this rank, and make an optimizer step on its own first batches.

    Args:
        args: The arguments.
        ranks: The ranks.
        transforms: How they use the model, in order; checked already.
        parts: What the user gave.

    Raises:
        ConfigurationError: If a setting cannot be applied, as in training.
        DataError: If there is no data.
    """
    if args.mixed_precision == "fp16":
        raise no_dry_run("mixed_precision", "fp16")
    for transform in transforms:
        transform.check_dry_run(args)
    state = fresh_state(args, ranks.env)
    alone = Ranks(StaticDistributedEnvironment(device=ranks.device))
    loader = train_loader(parts.train_data, args, alone, BatchPlacement(args, alone), parts.collator)
    set_length(state, args, loader)
    watch = CollectiveWatch()
    with fake_tensors(), _settings(args, ranks):
        built, loss = build_model_and_loss(args, ranks, transforms, parts, skip_init=False)
        optimizer = build_optimizer_of(args, built, parts)
        scheduler = build_scheduler(args, optimizer, state, parts)
        built.attach(optimizer)
        update = build_update(args, built, optimizer, scaler=None)
        with ordinary_tensors():
            window = _first_window(loader, args, loss)
        built.zero_grad()
        built.begin(0)
        with watch, _naming_the_model(built):
            _make_step(built, loss, update, window)
        if scheduler is not None:
            scheduler.step()
        held = _held(built, optimizer)
    length = row_length(window.positions[0])
    rows = samples_per_step(args, ranks)
    flops, executed = _flops(built, args, length, rows * length)
    return DryRun(
        parameters=sum(parameter.numel() for parameter in built.meta_model.parameters()),
        **held,
        optimizer_name=type(optimizer).__name__,
        rows=rows,
        row_length=length,
        flops=flops,
        executed_flops=executed,
        collectives=watch.found(),
        left_out=tuple(_left_out(args, ranks)),
    )


def no_dry_run(setting: str, value: object) -> ConfigurationError:
    """The error for a setting that a dry run cannot follow."""
    return ConfigurationError(
        setting,
        value,
        "needs real tensor values, which a dry run does not have",
        "leave it out of the dry run",
    )


@contextmanager
def _settings(args: TrainingArguments, ranks: Ranks) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(run_settings(args, ranks.device))
        if args.torch_compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _naming_the_model(built: BuiltModel) -> Iterator[None]:
    """A context in which it is the model's fault that something needs a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            "model",
            type(built.model).__name__,
            f"cannot run on tensors without values ({type(error).__name__}: {error})",
            "take what reads values, such as .item() or `if tensor:`, out of model and loss",
        ) from error


def _first_window(loader: object, args: TrainingArguments, loss: TokenLoss) -> Window:
    batches = iter(cast(Iterable[Batch], loader))
    window = next_window(batches, args.gradient_accumulation_steps, loss)
    if window is None:
        raise DataError("the training data gave no batch; give more data")
    return window


def _make_step(built: BuiltModel, loss: TokenLoss, update: Update, window: Window) -> None:
    """What the loop does in a step; gradients stay."""
    tokens = built.ranks.sum(window.target_tokens)
    built.executor.forward_backward(
        window.batches, loss, denominator=update.denominator(tokens), fire=lambda event: None
    )
    update.grad_norm()
    update.step()


def _held(built: BuiltModel, optimizer: Optimizer) -> dict[str, int]:
    parameters = [own_part(parameter) for parameter in built.model.parameters()]
    gradients = [own_part(each.grad) for each in built.parameters if each.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer": _bytes([own_part(value) for value in states if isinstance(value, Tensor)]),
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _flops(
    built: BuiltModel, args: TrainingArguments, length: int, tokens: int
) -> tuple[float | None, float | None]:
    account = FlopsAccount(built, args)
    flops = account.per_token(length) * tokens or None
    again = account.recomputed({length: tokens})
    return flops, None if flops is None or again is None else flops + again


def _left_out(args: TrainingArguments, ranks: Ranks) -> Iterator[str]:
    yield "initial weights, and those of a checkpoint"
    if args.torch_compile:
        yield "torch_compile: operators ran one by one"
    if ranks.env.world_size > 1:
        yield "the other ranks, and everything that goes between the hosts: batches, sums of a few numbers"
    yield "the rest of the data: whether they fill the steps of all ranks"
    yield "evaluation, checkpoints and callbacks"
