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
from .assembly import build_model, build_optimizer_of, build_scheduler, samples_per_step
from .batch import Batch, Window, next_window, row_length
from .collectives import Collective, CollectiveWatch
from .errors import ConfigurationError, DataError
from .flops_account import FlopsAccount
from .given import Ingredients
from .loaders import train_loader
from .loss import TokenLoss
from .model import ordinary_tensors, run_settings, without_values
from .optimization import own_part
from .parallelism import Parallelism, SingleDevice
from .schedule import set_length
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


def dry_run(args: TrainingArguments, parallel: Parallelism, parts: Ingredients) -> DryRun:
    """Build model and optimizer of this rank, and make an optimizer step on its own first batches.

    Args:
        args: The arguments.
        parallel: How the devices are used; checked already.
        parts: What the user gave.

    Raises:
        ConfigurationError: If a setting cannot be applied, as in training.
        DataError: If there is no data.
    """
    parallel.check_dry_run(args)
    state = fresh_state(args, parallel.env)
    alone = SingleDevice(StaticDistributedEnvironment(device=parallel.device))
    loader = train_loader(parts.train_data, args, alone, parts.collator)
    set_length(state, args, loader)
    watch = CollectiveWatch()
    with without_values(), _settings(args, parallel):
        loss = build_model(args, parallel, parts, weights_follow=False)
        optimizer = build_optimizer_of(args, parallel, parts)
        scheduler = build_scheduler(args, optimizer, state, parts)
        parallel.wrap(optimizer)
        update = build_update(args, parallel, optimizer, scaler=None)
        with ordinary_tensors():
            window = _first_window(loader, args, loss)
        parallel.trained_module.train()
        parallel.zero_grad()
        parallel.begin(0)
        with watch, _naming_the_model(parallel):
            _make_step(args, parallel, loss, update, window)
        if scheduler is not None:
            scheduler.step()
        held = _held(parallel, optimizer)
    length = row_length(window.positions[0])
    rows = samples_per_step(args, parallel)
    flops, executed = _flops(parallel, args, length, rows * length)
    return DryRun(
        parameters=sum(parameter.numel() for parameter in parallel.whole_model().parameters()),
        **held,
        optimizer_name=type(optimizer).__name__,
        rows=rows,
        row_length=length,
        flops=flops,
        executed_flops=executed,
        collectives=watch.found(),
        left_out=tuple(_left_out(args, parallel)),
    )


@contextmanager
def _settings(args: TrainingArguments, parallel: Parallelism) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(run_settings(args, parallel.device))
        if args.torch_compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _naming_the_model(parallel: Parallelism) -> Iterator[None]:
    """A context in which it is the model's fault that something needs a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            "model",
            type(parallel.unwrapped_model()).__name__,
            f"cannot run on tensors without values ({type(error).__name__}: {error})",
            "take what reads values, such as .item() or `if tensor:`, out of model and loss",
        ) from error


def _first_window(loader: object, args: TrainingArguments, loss: TokenLoss) -> Window:
    batches = iter(cast(Iterable[Batch], loader))
    window = next_window(batches, args.gradient_accumulation_steps, loss)
    if window is None:
        raise DataError("the training data gave no batch; give more data")
    return window


def _make_step(
    args: TrainingArguments, parallel: Parallelism, loss: TokenLoss, update: Update, window: Window
) -> None:
    """What the loop does in a step; gradients stay."""
    tokens = parallel.sum(window.target_tokens)
    for number, batch in enumerate(window.batches, start=1):
        last = number == len(window.batches)
        parallel.forward_backward(batch, loss, args, divisor=update.divisor(tokens), last=last)
    update.measure()
    update.apply()


def _held(parallel: Parallelism, optimizer: Optimizer) -> dict[str, int]:
    parameters = [own_part(parameter) for parameter in parallel.unwrapped_model().parameters()]
    gradients = [own_part(each.grad) for each in parallel.parameters if each.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(gradients),
        "optimizer": _bytes([own_part(value) for value in states if isinstance(value, Tensor)]),
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _flops(
    parallel: Parallelism, args: TrainingArguments, length: int, tokens: int
) -> tuple[float | None, float | None]:
    account = FlopsAccount(parallel, args)
    flops = account.per_token(length) * tokens or None
    again = account.recomputed({length: tokens})
    return flops, None if flops is None or again is None else flops + again


def _left_out(args: TrainingArguments, parallel: Parallelism) -> Iterator[str]:
    yield "initial weights, and those of a checkpoint"
    if args.torch_compile:
        yield "torch_compile: operators ran one by one"
    if parallel.env.world_size > 1:
        yield "the other ranks, and everything that goes between the hosts: batches, sums of a few numbers"
    yield "the rest of the data: whether they fill the steps of all ranks"
    yield "evaluation, checkpoints and callbacks"
