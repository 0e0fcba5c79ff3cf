"""Build what a rank would build and make a step, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_env import StaticDistributedEnvironment

from .arguments import TrainingArguments
from .build import build_model_and_loss, build_optimizer_of, build_scheduler, samples_per_step
from .data.loaders import Batch, Window, next_window, row_length, train_loader
from .distributed.executor import as_dtensor, own_part
from .distributed.ranks import BatchPlacement, Ranks
from .distributed.transforms import BuiltModel, ModelTransform
from .errors import ConfigurationError, DataError
from .inputs import TrainerInputs
from .loss import TokenLoss
from .metrics.comm_bytes import Collective, CollectiveWatch
from .metrics.log_window import FlopsAccount
from .metrics.memory import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    REDUCED,
    LiveBytes,
    RankMemory,
    attention_of_gpus,
)
from .model import fake_tensors, ordinary_tensors, run_settings
from .optimization import average_weights
from .periodic import set_length
from .run_state import optimizer_kind
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
    """Class of the optimizer; of several that step together all, such as `AdamW+Muon`."""
    per_rank_state: tuple[int, ...]
    """Parameters, gradients and optimizer state of each of the ranks that share the weights of this one."""
    memory: RankMemory | None
    """What a step takes of memory; None on an accelerator, where not all of it is seen."""
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
    args: TrainingArguments,
    ranks: Ranks,
    transforms: Sequence[ModelTransform],
    parts: TrainerInputs,
    *,
    passes: bool = True,
    memory_only: bool = False,
) -> DryRun:
    """Build model and optimizer of this rank, and make an optimizer step on its own first batches.

    Args:
        args: The arguments.
        ranks: The ranks.
        transforms: How they use the model, in order; checked already.
        parts: What the user gave.
        passes: Whether to make the forward and backward passes; without them the optimizer is stepped with
            gradients out of nowhere, which is enough to know the state.
        memory_only: Whether to leave out what tells nothing of memory: FLOPs, clipping, and microbatches
            behind the second where there is no pipeline, which find what the second one found.

    Raises:
        ConfigurationError: If a setting cannot be applied, as in training.
        DataError: If there is no data.
    """
    if parts.train_data is None:
        raise DataError("dry_run() needs a train_dataset. Give one to the Trainer.")
    if args.mixed_precision == "fp16":
        raise no_dry_run("mixed_precision", "fp16")
    for transform in transforms:
        transform.check_dry_run(args)
    if memory_only and ranks.layout.pipeline == 1:
        args = replace(args, gradient_accumulation_steps=min(2, args.gradient_accumulation_steps))
    state = fresh_state(args, ranks.env)
    alone = Ranks(StaticDistributedEnvironment(device=ranks.device))
    loader = train_loader(parts.train_data, args, alone, BatchPlacement(args, alone), parts.collator)
    set_length(state, args, loader)
    watch = CollectiveWatch()
    with fake_tensors(), _settings(args, ranks):
        source = getattr(parts.model, "__qualname__", type(parts.model).__name__)
        with _needs_no_values("model", source, "be built"):
            built, loss = build_model_and_loss(args, ranks, transforms, parts, skip_init=False)
        optimizer = build_optimizer_of(args, built, parts)
        average_weights(args, built, optimizer)
        scheduler = build_scheduler(args, optimizer, state, parts)
        own = map(own_part, [*built.model.parameters(), *built.model.buffers()])
        live = LiveBytes(own, keeps_sends=built.keeps_sends)
        with live:
            built.attach(optimizer)  # which makes the buckets of DDP, and they stay
        update = build_update(args, built, optimizer, scaler=None)
        with ordinary_tensors():
            window = _first_window(loader, args, loss)
        built.zero_grad()
        built.begin(0)
        if passes and ranks.layout.tensor * ranks.layout.context * ranks.layout.expert > 1:
            # The first time DTensor finds the shapes of results on whole tensors, which would be counted.
            with _needs_no_values("model", type(built.model).__name__):
                _make_passes(built, loss, update, window, LiveBytes())
            built.zero_grad()
        with watch:
            if passes:
                with _needs_no_values("model", type(built.model).__name__):
                    _make_passes(built, loss, update, window, live)
            else:
                for parameter in built.parameters:
                    parameter.grad = torch.empty_like(parameter)
            with _needs_no_values("optimizer_factory", type(optimizer).__name__, "step"):
                if memory_only:
                    _step_in_parts(built.parameters, optimizer)
                else:
                    update.grad_norm()
                    update.step()
        if scheduler is not None:
            scheduler.step()
        held = _held(built, optimizer)
        live.mark(map(own_part, held["gradients"]), GRADIENTS)
        # That of steps which are made in the backward pass.
        live.mark(map(own_part, held["optimizer"]), "optimizer")
    length = row_length(window.positions[0])
    rows = samples_per_step(args, ranks)
    flops, executed = _flops(built, args, length, rows * length) if not memory_only else (None, None)
    sizes = {name: sum(map(_bytes, tensors)) for name, tensors in held.items()}
    return DryRun(
        parameters=sum(parameter.numel() for parameter in built.meta_model.parameters()),
        **sizes,
        optimizer_name=optimizer_kind(optimizer),
        per_rank_state=_per_rank([tensor for tensors in held.values() for tensor in tensors]),
        memory=_memory(built, live, sizes, passes=passes) if ranks.device.type == "cpu" else None,
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
def _needs_no_values(setting: str, name: str, does: str = "run") -> Iterator[None]:
    """A context in which it is the fault of what a setting names that something needs a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            setting,
            name,
            f"cannot {does} on tensors without values ({type(error).__name__}: {error})",
            "take what reads values, such as .item() or `if tensor:`, out of model, loss and optimizer",
        ) from error


def _first_window(loader: Iterable[Batch], args: TrainingArguments, loss: TokenLoss) -> Window:
    window = next_window(iter(loader), args.gradient_accumulation_steps, loss)
    if window is None:
        raise DataError("the training data gave no batch. Give more data.")
    return window


def _make_passes(built: BuiltModel, loss: TokenLoss, update: Update, window: Window, live: LiveBytes) -> None:
    """What the loop does in a step; gradients stay."""
    tokens = built.ranks.sum(window.target_tokens)
    batches = [_fake_batch(batch) for batch in window.batches]
    for value in batches[0].values():
        if isinstance(value, Tensor):
            live.add(value)  # on the device there is one batch at a time
    with live, attention_of_gpus(built.args):
        built.forward_backward(batches, loss, denominator=update.denominator(tokens), fire=lambda event: None)


_AT_ONCE = 32
"""Parameters that are stepped together."""


def _step_in_parts(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
    """Step some parameters at a time: DTensor looks at each pair of tensors that are stepped together."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for first in range(0, len(parameters), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        for parameter, gradient in zip(parameters[part], gradients[part], strict=True):
            parameter.grad = gradient
        optimizer.step()
        for parameter in parameters[part]:
            parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _fake_batch(batch: Batch) -> dict[str, object]:
    """A batch on fake tensors of its own, whose memory is theirs alone."""
    return {
        name: torch.empty_like(value) if isinstance(value, Tensor) else value for name, value in batch.items()
    }


def _held(built: BuiltModel, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": list(built.model.parameters()),
        "gradients": [each.grad for each in built.parameters if each.grad is not None],
        "optimizer": [value for value in states if isinstance(value, Tensor)]
        + ([] if built.average is None else built.average.extra()),
    }


def _bytes(tensor: Tensor) -> int:
    return own_part(tensor).nbytes


def _per_rank(held: Sequence[Tensor]) -> tuple[int, ...]:
    """The bytes of these tensors on each of the ranks that share one copy of the weights, this one first."""
    shared: dict[tuple[int, int, int], int] = {}  # of so many, by length and bytes of a row
    ranks, equal = 1, 0
    for tensor in held:
        dims = _divided(tensor)
        if len(dims) != 1:
            # Whole on each; or divided by several dimensions, which no plan looks into.
            equal += _bytes(tensor)
            continue
        ((of, dim),) = dims
        ranks = max(ranks, of)
        length = tensor.shape[dim]
        row = tensor.numel() // max(length, 1) * tensor.element_size()
        shared[of, length, row] = shared.get((of, length, row), 0) + 1
    return tuple(
        equal + sum(count * row * _rows(length, of, rank) for (of, length, row), count in shared.items())
        for rank in range(ranks)
    )


def _divided(tensor: Tensor) -> list[tuple[int, int]]:
    """By how many ranks a tensor is divided, and which of its dimensions, for each that is."""
    placed = as_dtensor(tensor)
    if placed is None:
        return []
    from torch.distributed.tensor import Shard

    mesh = placed.device_mesh
    return [
        (mesh.size(mesh_dim), placement.dim)
        for mesh_dim, placement in enumerate(placed.placements)
        if isinstance(placement, Shard) and placement.is_shard()
    ]


def _rows(length: int, ranks: int, rank: int) -> int:
    """Rows that a rank holds: those of `torch.chunk`, whose last ones get fewer or none."""
    most = -(-length // ranks)
    return max(0, min(most, length - rank * most))


def _memory(built: BuiltModel, live: LiveBytes, held: dict[str, int], *, passes: bool) -> RankMemory:
    """What the step took."""
    on_host = built.weights_device is not None
    kinds = (ACTIVATIONS, GATHERED, REDUCED, *(() if on_host else (GRADIENTS,)))
    return RankMemory(
        rank=built.ranks.coordinates["pipeline"],
        stages=built.stages,
        layers=built.layers,
        parameters=held["weights"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        gathered=live.most((GATHERED,)),
        reduced=live.most((REDUCED,)),
        saved_activations=live.saved,
        activations=live.most((ACTIVATIONS,)),
        peak=live.most(kinds) if passes or on_host else held["gradients"],
        on_host=sum(held.values()) if on_host else 0,
        state_on_host=on_host,
    )


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
