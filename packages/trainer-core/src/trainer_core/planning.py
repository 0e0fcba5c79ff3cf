"""Plan the memory of a run, whatever its layout: make a step of the ranks that differ, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dist_env import ParallelLayout, fake_job

from .arguments import TrainingArguments
from .distributed.transforms import ModelTransform
from .dry_run import DryRun
from .errors import ConfigurationError
from .metrics.memory import RankMemory
from .model import ModelInit
from .optimization import OptimizerFactory
from .trainer import Trainer

_GIB = 2**30
_LEFT_OUT = "fragmentation of the allocator, workspaces of kernels, buffers of NCCL, the libraries themselves"


@dataclass(frozen=True, kw_only=True)
class Plan(RankMemory):
    """Memory of the fullest rank, in bytes, and of each that differs from it.

    Parameters, gradients and optimizer state are exact. The rest is that of a step which the trainer has made
    on fake tensors: an estimate, without what kernels allocate inside themselves.
    """

    layout: ParallelLayout
    """Sizes of the dimensions."""
    parameter_count: int
    """Parameters of the whole model, tied ones once."""
    batch_size: int
    """Examples of one rank at a time; in a pipeline of all its microbatches together."""
    sequence_length: int
    """Positions of one example."""
    optimizer_name: str
    """Class of the optimizer."""
    per_rank: tuple[RankMemory, ...]
    """One rank of each place in the pipeline, in order; without a pipeline one. Others need no more."""
    per_rank_state: tuple[int, ...]
    """Parameters, gradients and optimizer state of each of the ranks that share the weights of the first."""
    notes: tuple[str, ...] = ()
    """What one should know about the estimate."""

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.per_rank, key=lambda rank: rank.total)

    @property
    def margin(self) -> int:
        """5 % of what the fullest rank needs and 1 GiB, for what no plan counts."""
        return margin_of(super().total)

    @property
    def total(self) -> int:
        """Memory of the device of the fullest rank, with the margin."""
        return super().total + self.margin

    def to_json(self) -> dict[str, object]:
        """All figures as plain values, bytes as whole numbers."""
        layout = self.layout
        return {
            **vars(self),
            "layout": str(layout),
            "mesh": {"shards": layout.shard, "replicas": layout.replicate},
            "per_rank": [{**asdict(rank), "total": rank.total} for rank in self.per_rank],
            "per_rank_state": list(self.per_rank_state),
            "notes": list(self.notes),
            "margin": self.margin,
            "total": self.total,
        }

    def __str__(self) -> str:
        head = (
            f"{self.parameter_count:,} parameters; {_words(self.layout)}; "
            f"{self.batch_size} x {self.sequence_length} tokens on each; GiB per GPU:"
        )
        rows = self._rows() if len(self.per_rank) == 1 else self._ranks()
        notes = (f"left out: {_LEFT_OUT}", *self.notes)
        return "\n".join([head, *rows, *(f"  {note}" for note in notes)])

    def _rows(self) -> Iterator[str]:
        """A line for each figure."""
        host = "on the host" if self.state_on_host else ""
        spread = host or ("the fullest rank" if len(set(self.per_rank_state)) > 1 else "")
        rows = [
            ("parameters", self.parameters, spread),
            ("gradients", self.gradients, host),
            ("optimizer state", self.optimizer, ", ".join(filter(None, (self.optimizer_name, host)))),
            ("gathered weights", self.gathered, "of other ranks, whole and as they are received"),
            ("gradients under way", self.reduced, "to the ranks they belong to, or waiting for it"),
            ("activations", self.activations, f"{_gib(self.saved_activations)} kept for the backward pass"),
            ("at one time", super().total, "the most; not all of these are at their most together"),
            ("margin", self.margin, "5 % and 1 GiB for what is left out"),
            ("total", self.total, ""),
            ("on the host", self.on_host, "per GPU"),
        ]
        optional = ("gathered weights", "gradients under way", "on the host")
        shown = [row for row in rows if row[1] or row[0] not in optional]
        width = max(len(name) for name, _, _ in shown)
        return (f"  {name:<{width}}  {_gib(size):>9}  {text}".rstrip() for name, size, text in shown)

    def _ranks(self) -> Iterator[str]:
        """A line for each rank of a pipeline."""
        names = {
            "parameters": "parameters",
            "gradients": "gradients",
            "optimizer": "optimizer state",
            "gathered": "gathered",
            "reduced": "under way",
            "activations": "activations",
            "total": "at one time",
        }
        names = {name: head for name, head in names.items() if any(getattr(r, name) for r in self.per_rank)}
        rows = [("rank", "layers", *names.values())]
        for rank in self.per_rank:
            spans = (f"{first} to {last}" if last > first else f"{first}" for first, last in rank.layers)
            sizes = (_gib(getattr(rank, name)) for name in names)
            rows.append((str(rank.rank), ", ".join(spans), *sizes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  " + "  ".join(map(str.rjust, row, widths))
        yield (
            f"  rank {self.rank} needs most: {_gib(super().total)}, and with a margin of 5 % and 1 GiB "
            f"{_gib(self.total)}; {self.optimizer_name}"
        )


def margin_of(size: int) -> int:
    """Bytes to add to so many that are planned, for what no plan counts: 5 % of them, and 1 GiB."""
    return int(0.05 * size) + _GIB


def plan(
    args: TrainingArguments,
    *,
    model_init: ModelInit,
    world_size: int,
    sequence_length: int | None = None,
    batch: Mapping[str, Tensor] | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    trainer: Callable[..., Trainer] = Trainer,
    parallel: Sequence[ModelTransform] = (),
    passes: bool = True,
) -> Plan:
    """Say what a run will need of memory, before anything of it is allocated.

    One rank of each place in the pipeline builds its part of the run and makes an optimizer step, one after
    the other in this process, by the trainer's own code on fake tensors; the other ranks are fake. Among
    the ranks that share out weights the first one stands for all, since it has the largest parts.

    Operators are those of a CPU, where attention keeps no matrix of sequence by sequence either, without
    torch.compile, in bf16 where the run uses FP8, and with the chunked loss where a kernel of another package
    is asked for. Without a pipeline, two microbatches stand for more of them.

    Args:
        args: The settings of the run; `mesh` says how the ranks are used, or the trainer.
        model_init: Builds the model, as the trainer is given it.
        world_size: Number of ranks.
        sequence_length: Tokens of one example of `input_ids` and `labels`, of which
            `args.per_device_train_batch_size` are a batch.
        batch: What a rank, or a pipeline, gets at a time, for models that take something else; only shapes
            and dtypes count.
        optimizer_factory: As the trainer is given it; none: the built-in AdamW.
        trainer: The class of the trainer, for how it uses several ranks.
        parallel: As the trainer is given it.
        passes: Whether to make the forward and backward passes; without them only the state is known, which
            is quicker, and a bound from below.

    Returns:
        The plan of the fullest rank.

    Raises:
        ConfigurationError: If the settings do not fit the ranks or the model, not one of batch and sequence
            length is given, or model, loss or optimizer cannot do without values.
        dist_env.DistributedEnvironmentError: If this process has a process group.

    Example:
        >>> print(plan(args, model_init=Model, world_size=8, sequence_length=4096))  # doctest: +SKIP
    """
    if world_size < 1:
        raise ConfigurationError("world_size", world_size, "must be at least 1", "set it to 1 or more")
    rows = _Rows(planned_batch(args.per_device_train_batch_size, sequence_length, batch))
    planned = args.for_planning(len(rows.batch["labels"]))
    found: list[DryRun] = []
    transforms: Sequence[ModelTransform] | None = None
    places = [0]
    for rank in places:  # which grow to those of a pipeline, once the first has told the layout
        with fake_job(world_size, rank=rank, process_group=True) as env:
            # Later ranks continue with the transforms of the first, which have seen the hidden states that
            # only the first stage can tell.
            make, given = (trainer, parallel) if transforms is None else (Trainer, transforms)
            made = make(
                planned,
                model_init=model_init,
                train_dataset=rows,
                eval_dataset=rows,
                optimizer_factory=optimizer_factory,
                callbacks=[],
                distributed_env=env,
                parallel=given,
            )
            layout, transforms = made.ranks.layout, made.transforms
            places[:] = layout.group("pipeline", 0)
            found.append(made.dry_run(passes=passes, memory_only=True))
    return _plan_of(args, layout, transforms or (), found, rows)


def _plan_of(
    args: TrainingArguments,
    layout: ParallelLayout,
    transforms: Sequence[ModelTransform],
    found: Sequence[DryRun],
    rows: _Rows,
) -> Plan:
    ranks = [each.memory for each in found if each.memory is not None]
    offloads = args.enable_activation_offloading and layout.pipeline == 1
    if offloads:
        ranks = [_offloaded(rank) for rank in ranks]
    active = [transform for transform in transforms if transform.is_active(layout)]
    told = {
        "enable_activation_offloading keeps fewer activations on the GPU than this": (
            args.enable_activation_offloading and not offloads
        ),
        "layers of fp8_recipe are counted as in bf16": args.fp8_recipe is not None,
        "fused_loss is counted as the chunked one": args.fused_loss in ("liger", "cut"),
        "torch_compile usually keeps fewer activations than this": args.torch_compile,
    }
    return Plan(
        **vars(max(ranks, key=lambda rank: rank.total)),
        layout=layout,
        parameter_count=found[0].parameters,
        batch_size=rows.batch_size,
        sequence_length=found[0].row_length,
        optimizer_name=found[0].optimizer_name,
        per_rank=tuple(ranks),
        per_rank_state=found[0].per_rank_state,
        notes=(
            *(note for transform in active for note in transform.plan_notes(args, layout)),
            *(note for note, applies in told.items() if applies),
        ),
    )


def _offloaded(rank: RankMemory) -> RankMemory:
    """The same where what is kept for the backward pass is kept on the host."""
    saved = rank.saved_activations
    return replace(
        rank,
        activations=rank.activations - saved,
        peak=max(rank.peak - saved, 0 if rank.state_on_host else rank.gradients),
        on_host=rank.on_host + saved,
    )


class _Rows:
    """The same batch again and again."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch
        self.batch_size = len(batch["labels"])

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        while True:
            yield self.batch


def planned_batch(
    rows: int, sequence_length: int | None = None, batch: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Zeros of the shapes and dtypes of a batch.

    Args:
        rows: How many, where no batch is given.
        sequence_length: Positions of `input_ids` and `labels`, [rows, sequence_length] each.
        batch: What a model gets at a time, instead; with `labels`.

    Raises:
        ConfigurationError: If neither or both are given, a row is too short to predict anything, or the
            batch has no labels.
    """
    if sequence_length is not None and batch is not None:
        raise ConfigurationError(
            "sequence_length", sequence_length, "cannot be given together with batch", "give only one of them"
        )
    if sequence_length is None and batch is None:
        raise ConfigurationError(
            "sequence_length",
            sequence_length,
            "is needed to compute the activations, unless a batch is given",
            "give sequence_length or batch",
        )
    if batch is None:
        if sequence_length is None or sequence_length < 2:
            raise ConfigurationError(
                "sequence_length", sequence_length, "must be at least 2", "set it to 2 or more"
            )
        ids = torch.zeros((rows, sequence_length), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}
    if not isinstance(batch.get("labels"), Tensor):
        raise ConfigurationError("batch", sorted(batch), "has no tensor 'labels'", "add it, with any values")
    return {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in batch.items()}


def longest_sequence(
    needs: Callable[[int], int], limit: int, *, begin: int, multiple: int = 256
) -> int | None:
    """Find how long rows may be: memory grows with their length, nearly along a line.

    Args:
        needs: The bytes that rows of a length need, such as `plan(..., sequence_length=length).total`.
        limit: The bytes that there are.
        begin: A length to begin with.
        multiple: Lengths are multiples of it.

    Returns:
        A length that was planned and fits, at most 3 % below one that was planned and does not; None if
        `multiple` itself does not fit.
    """
    known: dict[int, int] = {}
    fits, misses = 0, 0
    length = max(1, begin // multiple)
    while True:
        known[length] = needs(length * multiple)
        if known[length] <= limit:
            fits = length
        else:
            misses = length
        if misses and misses - fits <= max(1, fits // 32):
            return fits * multiple or None
        if len(known) == 1:
            length = 2 * length if fits else max(1, length // 2)
            continue
        # Along the line through the two nearest ones, a little below, and never far from what is known.
        near = sorted(known, key=lambda each: abs(known[each] - limit))[:2]
        slope = (known[near[0]] - known[near[1]]) / (near[0] - near[1])
        found = int(0.99 * (near[0] + (limit - known[near[0]]) / slope)) if slope > 0 else 2 * fits
        # At least so far above what fits that, if it does not, the search ends.
        step = max(1, fits // 32)
        length = min(max(found, fits + step), misses - 1 if misses else 8 * fits)


def _words(layout: ParallelLayout) -> str:
    """How many ranks share a copy of the model, and how many copies there are."""
    copy = layout.world_size // layout.replicate
    if layout.pipeline > 1:
        count, stages = layout.data_count, layout.pipeline
        several = f"{count} pipelines of {stages} GPUs" if count > 1 else f"a pipeline of {stages} GPUs"
        return several + (f", stages shared by {copy // stages}" if copy > stages else "")
    if layout.replicate == 1:
        return f"one copy over {copy} GPUs" if copy > 1 else "one GPU"
    if copy == 1:
        return f"{layout.replicate} GPUs, a whole copy on each"
    return f"{layout.replicate} copies, each over {copy} GPUs"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"
