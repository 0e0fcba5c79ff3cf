"""What ranks of a pipeline allocate in a step, to hold a plan against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import profile

from dist_env import DistributedEnvInterface
from trainer_core import Batch, BuiltModel, Executor, ForwardOutput, TokenLoss, Trainer
from trainer_pipeline import PipelineArguments, PipelineStages, PipelineTrainingArguments

if TYPE_CHECKING:
    from ranks import Scenario

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 101, 48, 8, 16, 64

SETTINGS: dict[str, dict[str, object]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "zero bubble": {"schedule": "zbv"},
    "gpipe, accumulated": {"schedule": "gpipe"},
    "1f1b, accumulated": {"schedule": "1f1b"},
    "copies": {"schedule": "1f1b", "replicas": 2},
    "copies that share": {"schedule": "1f1b", "replicas": 2, "shard_replicas": True},
}
"""Of four ranks, by what is measured."""


class Layer(nn.Module):
    """Feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Deep(nn.Module):
    """Activations of several times the size of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Rows:
    """The same batch again and again."""

    batch_size = ROWS

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        ids = (torch.arange(ROWS * LENGTH) % VOCABULARY).view(ROWS, LENGTH)
        while True:
            yield {"input_ids": ids, "labels": ids}


def accumulation(name: str) -> int:
    """Batches of a step of what is measured."""
    return 3 if name.endswith(", accumulated") else 1


def arguments(folder: Path, name: str) -> PipelineTrainingArguments:
    """The settings of what is measured."""
    pipeline = PipelineArguments(n_microbatches=8, balance="layers", **SETTINGS[name])  # type: ignore[arg-type]
    return PipelineTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=1,
        check_flops=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulation(name),
        pipeline=pipeline,
        transformer_layers_path="layers",
        save_strategy="no",
        use_cpu=True,
    )


class Measured(PipelineStages):
    """Stages whose executor is measured."""

    executor: MeasuredExecutor

    def apply(self, built: BuiltModel) -> None:
        """Cut the model, and measure what runs it."""
        super().apply(built)
        built.executor = self.executor = MeasuredExecutor(built.executor)


class MeasuredExecutor:
    """Notes the most that torch's allocator has given out at a time in the passes of the first step.

    What it receives into is allocated there, too.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.peak = 0

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Take a batch through the pipeline, forward only."""
        return self.executor.forward(batch, loss)

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Callable[[str], object]
    ) -> Tensor:
        """Take the batches of a step through the pipeline."""
        with profile(profile_memory=True) as seen:
            total = self.executor.forward_backward(batches, loss, denominator=denominator, fire=fire)
        now = self.peak = 0
        for size in _allocations(seen):
            now += size
            self.peak = max(self.peak, now)
        return total


def _allocations(seen: profile) -> Iterator[int]:
    """Sizes as they were allocated and, below 0, freed."""
    waiting = list(seen.profiler.kineto_results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return iter(size for _, size in sorted(found))


def allocated(env: DistributedEnvInterface, folder: Path, name: str) -> object:
    """Bytes in the passes of a step, gradients among them."""
    stages = Measured()
    trainer = Trainer(
        arguments(folder, name),
        model_init=Deep,
        train_dataset=Rows(),
        callbacks=[],
        distributed_env=env,
        parallel=[stages],
    )
    trainer.train()
    return {"rank": trainer.ranks.coordinates["pipeline"], "peak": stages.executor.peak}


SCENARIOS: dict[str, Scenario] = {f"allocated, {name}": partial(allocated, name=name) for name in SETTINGS}
