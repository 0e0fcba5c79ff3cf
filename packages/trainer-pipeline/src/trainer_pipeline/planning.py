"""Plan the memory of each rank of a pipeline: make a step of each of them on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dist_env import ParallelLayout, imagined_job
from trainer_core import (
    MARGIN_STANDS_FOR,
    Batch,
    BuiltModel,
    ConfigurationError,
    DryRun,
    Executor,
    ForwardOutput,
    LiveBytes,
    ModelInit,
    PlannedBatch,
    TokenLoss,
    Trainer,
    attention_of_gpus,
    margin_of,
)

from .arguments import PipelineTrainingArguments
from .microbatches import ActivationSpecs
from .splitting import ModelSplitter
from .transform import PipelineHooks, PipelineStages

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]

_GIB = 2**30
_HEADS = ("rank", "layers", "parameters", "gradients", "optimizer state", "activations", "total")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one rank of a pipeline, in bytes; copies of it on other ranks need the same."""

    rank: int
    """Its place in the pipeline."""
    stages: tuple[int, ...]
    """Its stages."""
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each of its stages; empty if the user's splitter makes them of other things."""
    parameters: int
    """What it holds of the parameters."""
    gradients: int
    """What it holds of the gradients."""
    optimizer: int
    """What it holds of the optimizer's state."""
    activations: int
    """Most bytes at a time beside these: activations of all microbatches under way, hidden states and their
    gradients that are sent and received, and weights that are gathered from copies."""

    @property
    def total(self) -> int:
        """All of it at once, without a margin."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def row(self) -> tuple[str, ...]:
        """Its line of the table, in GiB."""
        sizes = (self.parameters, self.gradients, self.optimizer, self.activations, self.total)
        spans = (f"{first} to {last}" if last > first else f"{first}" for first, last in self.layers)
        return (str(self.rank), ", ".join(spans), *(f"{size / _GIB:.2f}" for size in sizes))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Memory of the ranks of a pipeline.

    Parameters, gradients and optimizer state are exact; activations are an estimate, of a step in which the
    schedule itself ran.
    """

    schedule: str
    """Name of the schedule."""
    n_microbatches: int
    """Pieces of a batch."""
    replicas: int
    """Pipelines side by side."""
    parameter_count: int
    """Parameters of the whole model, tied ones once."""
    batch_size: int
    """Examples of one pipeline at a time, all microbatches together."""
    sequence_length: int
    """Tokens of one example."""
    optimizer_name: str
    """Class of the optimizer."""
    per_rank: tuple[StageMemory, ...]
    """The ranks of a pipeline, in order."""
    notes: tuple[str, ...] = ()
    """What one should know about the estimate."""

    @property
    def fullest(self) -> StageMemory:
        """The rank that needs most."""
        return max(self.per_rank, key=lambda rank: rank.total)

    @property
    def margin(self) -> int:
        """5 % of what the fullest rank needs and 1 GiB, for what is left out."""
        return margin_of(self.fullest.total)

    @property
    def total(self) -> int:
        """Memory of the device of the fullest rank, with the margin."""
        return self.fullest.total + self.margin

    def to_json(self) -> dict[str, object]:
        """All figures as plain values, bytes as whole numbers."""
        ranks = [{**asdict(rank), "total": rank.total} for rank in self.per_rank]
        own = {**vars(self), "per_rank": ranks, "notes": list(self.notes)}
        return {**own, "margin": self.margin, "total": self.total}

    def __str__(self) -> str:
        several = f"{self.replicas} pipelines of " if self.replicas > 1 else ""
        head = (
            f"{self.parameter_count:,} parameters; {several}{len(self.per_rank)} GPUs; {self.schedule}, "
            f"{self.n_microbatches} microbatches; {self.batch_size} x {self.sequence_length} tokens in each "
            f"pipeline; {self.optimizer_name}; GiB per GPU:"
        )
        margin = (
            f"rank {self.fullest.rank} needs most: {self.fullest.total / _GIB:.2f}, and with a margin of 5 % "
            f"and 1 GiB {self.total / _GIB:.2f}"
        )
        notes = (margin, f"left out: {MARGIN_STANDS_FOR}", *self.notes)
        rows = _aligned([_HEADS, *(rank.row() for rank in self.per_rank)])
        return "\n".join([head, *rows, *(f"  {note}" for note in notes)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]


def plan(
    model_init: ModelInit,
    args: PipelineTrainingArguments,
    *,
    world_size: int,
    sequence_length: int | None = None,
    batch: Mapping[str, Tensor] | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    model_splitter: ModelSplitter | None = None,
) -> PipelinePlan:
    """Say what each stage of a pipeline will need of memory, before anything of it is allocated.

    Each rank of one pipeline builds its stages and makes an optimizer step by the schedule, one after the
    other in this process, on tensors without values; the other ranks are imagined. Parameters, gradients and
    optimizer state are exact. Activations are those of all microbatches that the schedule has under way, on
    the kernels of a CPU, where attention keeps no matrix of sequence by sequence either, without
    torch.compile. Schedules of several stages a rank do not wait for what they send: it is counted to the end
    of the step, which is the longest that it can take.

    Args:
        model_init: Builds the model, as the trainer is given it.
        args: The settings of the run.
        world_size: Number of ranks, those of all copies of the pipeline.
        sequence_length: Tokens of one example of `input_ids` and `labels`.
        batch: What a pipeline gets at a time, for models that take something else; only shapes and dtypes
            count.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.
        model_splitter: As the trainer is given it.

    Returns:
        The plan of one pipeline.

    Raises:
        ConfigurationError: If the settings do not fit the ranks or the model, not one of batch and sequence
            length is given, or model or loss cannot do without values.
        dist_env.DistributedEnvironmentError: If this process has a process group.

    Example:
        >>> print(plan(model_init, args, world_size=8, sequence_length=4096))  # doctest: +SKIP
    """
    if world_size < 2:
        raise ConfigurationError("world_size", world_size, "is no pipeline", "give at least 2")
    planned = PlannedBatch(sequence_length, batch)
    rows = _Rows(planned.of(args.per_device_train_batch_size, torch.device("cpu")))
    known = ActivationSpecs()
    seen: list[StageMemory] = []

    def plan_rank(rank: int) -> tuple[ParallelLayout, DryRun]:
        with imagined_job(world_size, rank=rank) as env:
            watched = _WatchedStages(model_splitter, known)
            trainer = Trainer(
                _to_plan(args, rows.batch_size),
                model_init=model_init,
                train_dataset=rows,
                eval_dataset=rows,
                optimizer_factory=optimizer_factory,
                callbacks=[],
                distributed_env=env,
                parallel=[watched],
            )
            layout = trainer.ranks.layout
            if layout.pipeline == 1:
                raise ConfigurationError("mesh", str(layout), "has no stages", "give it pp=2, say")
            found = trainer.dry_run()
            seen.append(watched.memory(found))
            return layout, found

    layout, found = plan_rank(0)
    # Other pipelines have the same stages, so that the first one stands for all.
    for rank in layout.group("pipeline", 0)[1:]:
        layout, found = plan_rank(rank)
    return PipelinePlan(
        schedule=args.pipeline.schedule,
        n_microbatches=args.pipeline.n_microbatches,
        replicas=layout.data_count,
        parameter_count=found.parameters,
        batch_size=rows.batch_size,
        sequence_length=found.row_length,
        optimizer_name=found.optimizer_name,
        per_rank=tuple(seen),
        notes=_notes(args),
    )


class _WatchedStages(PipelineStages):
    """Stages of which everything that is alive in the passes of a step is watched.

    Args:
        splitter: Cuts the model.
        specs: Hidden states that an earlier rank has seen; only the first stage can tell them.
    """

    def __init__(self, splitter: ModelSplitter | None, specs: ActivationSpecs) -> None:
        super().__init__(splitter=splitter)
        self.activation_specs = specs
        self._built: BuiltModel | None = None
        self._watch: _Watch | None = None

    def apply(self, built: BuiltModel) -> None:
        """Cut the model, and watch what runs it."""
        super().apply(built)
        self._built = built
        sends = self._kind_of(built.args).several_stages
        built.executor = self._watch = _Watch(built.executor, built, slow_sends=sends)

    def memory(self, found: DryRun) -> StageMemory:
        """What this rank needs."""
        if self._built is None or self._watch is None:
            raise RuntimeError("the model was not built")
        (hooks,) = [hook for hook in self._built.hooks if isinstance(hook, PipelineHooks)]
        place, spans = hooks.place, hooks.spans
        stages = place.layout.stages_of(place.rank)
        return StageMemory(
            rank=place.rank,
            stages=stages,
            layers=tuple((spans[stage].start, spans[stage].stop - 1) for stage in stages) if spans else (),
            parameters=found.weights,
            gradients=found.gradients,
            optimizer=found.optimizer,
            activations=self._watch.peak - found.gradients,
        )


class _Watch:
    """An executor that notes the most that is alive while another one carries out a step."""

    def __init__(self, executor: Executor, built: BuiltModel, *, slow_sends: bool) -> None:
        self._executor = executor
        self._built = built
        self._slow_sends = slow_sends
        self.peak = 0

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Take a batch through the pipeline, forward only."""
        return self._executor.forward(batch, loss)

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Callable[[str], object]
    ) -> Tensor:
        """Take the batches of a step through the pipeline, forward and backward."""
        held = self._built.model
        live = LiveBytes([*held.parameters(), *held.buffers()])
        sends = SlowSends() if self._slow_sends else nullcontext()
        with live, attention_of_gpus(self._built.args), sends:
            total = self._executor.forward_backward(batches, loss, denominator=denominator, fire=fire)
        self.peak = live.peak
        return total


class SlowSends(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which what is sent stays to its end, as if no neighbour were ready for it before.

    Schedules of several stages a rank do not wait for what they send, and the sender keeps it until it has
    gone; when that is depends on the neighbours. Imagined ones would take it at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and func._opname == "send":
            self._kept.append(args[0])
        return func(*args, **(kwargs or {}))


class _Rows:
    """The same batch again and again.

    Args:
        batch: What a pipeline gets at a time.
    """

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self._batch = batch
        self.batch_size = len(batch["labels"])

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        while True:
            yield self._batch


def _to_plan(args: PipelineTrainingArguments, batch_size: int) -> PipelineTrainingArguments:
    """The same steps where there is no accelerator and none of its kernels."""
    fused = "chunked" if args.fused_loss in ("liger", "cut") else args.fused_loss
    return replace(
        args,
        use_cpu=True,
        device=None,
        fused_loss=fused,
        enable_activation_offloading=False,
        per_device_train_batch_size=batch_size,
        max_steps=max(args.max_steps, 1),
    )


def _notes(args: PipelineTrainingArguments) -> tuple[str, ...]:
    told = {
        "enable_activation_offloading keeps fewer activations on the GPU than this": (
            args.enable_activation_offloading
        ),
        "fused_loss is counted as the chunked one": args.fused_loss in ("liger", "cut"),
        "torch_compile usually keeps fewer activations than this": args.torch_compile,
    }
    return tuple(note for note, applies in told.items() if applies)
