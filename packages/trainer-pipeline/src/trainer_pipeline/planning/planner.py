"""Plans a pipeline by making a step of each of its ranks, on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dist_env import DistributedEnvInterface, imagined_job
from trainer_core import (
    Batch,
    ConfigurationError,
    DryRun,
    LiveBytes,
    ModelInit,
    PlannedBatch,
    TokenLoss,
    TrainingArguments,
    attention_of_gpus,
)

from ..arguments import PipelineTrainingArguments
from ..boundaries import Boundaries
from ..parallelism import PipelineParallelism
from ..splitting import ModelSplitter
from ..trainer import PipelineTrainer
from .sends import SlowSends
from .stage_memory import PipelinePlan, StageMemory

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


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
    replicas = args.pipeline.replicas
    planned = PlannedBatch(sequence_length, batch)
    rows = _Rows(planned.of(args.per_device_train_batch_size, torch.device("cpu")))
    known = Boundaries()
    ranks = []
    # Neighbouring ranks have the same stages, so that one of them stands for all.
    for rank in range(0, world_size, replicas):
        with imagined_job(world_size, rank=rank) as env:
            watched = _Watched(env, model_splitter, known)
            found = PipelineTrainer(
                _to_plan(args, rows.batch_size),
                model_init=model_init,
                train_dataset=rows,
                eval_dataset=rows,
                optimizer_factory=optimizer_factory,
                callbacks=[],
                parallelism=watched,
            ).dry_run()
            ranks.append(watched.memory(found))
    return PipelinePlan(
        schedule=args.pipeline.schedule,
        n_microbatches=args.pipeline.n_microbatches,
        replicas=replicas,
        parameter_count=found.parameters,
        batch_size=rows.batch_size,
        sequence_length=found.row_length,
        optimizer_name=found.optimizer_name,
        per_rank=tuple(ranks),
        notes=_notes(args),
    )


class _Watched(PipelineParallelism):
    """Watches what is alive in the passes of a step.

    Args:
        env: The rank.
        splitter: Cuts the model.
        known: Hidden states that an earlier rank has seen; only the first stage can tell them.
    """

    def __init__(
        self, env: DistributedEnvInterface, splitter: ModelSplitter | None, known: Boundaries
    ) -> None:
        super().__init__(env, splitter)
        self.boundaries = known
        self._live: LiveBytes | None = None

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Take a batch through the pipeline, forward and backward."""
        if self._live is None:
            held = self.unwrapped_model()
            self._live = LiveBytes([*held.parameters(), *held.buffers()])
        sends = SlowSends() if self.kind.several_stages else nullcontext()
        with self._live, attention_of_gpus(args), sends:
            return super().forward_backward(batch, loss, args, divisor=divisor, last=last)

    def memory(self, found: DryRun) -> StageMemory:
        """What this rank needs."""
        stages = self._layout.stages_of(self.pipeline_rank)
        spans = () if self._built is None else self._built.spans
        peak = 0 if self._live is None else self._live.peak
        return StageMemory(
            rank=self.pipeline_rank,
            stages=stages,
            layers=tuple((spans[stage].start, spans[stage].stop - 1) for stage in stages) if spans else (),
            parameters=found.weights,
            gradients=found.gradients,
            optimizer=found.optimizer,
            activations=peak - found.gradients,
        )


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
