"""What ranks of a pipeline allocate in a step, to hold a plan against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import profile

from dist_env import DistributedEnvInterface
from trainer_core import Batch, TokenLoss, TrainingArguments
from trainer_pipeline import (
    PipelineArguments,
    PipelineParallelism,
    PipelineTrainer,
    PipelineTrainingArguments,
)

if TYPE_CHECKING:
    from ranks import Scenario

VOCABULARY, WIDTH, LAYERS, ROWS, LENGTH = 101, 48, 8, 16, 64

SETTINGS: dict[str, dict[str, object]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "zero bubble": {"schedule": "zbv"},
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


def arguments(folder: Path, name: str) -> PipelineTrainingArguments:
    """The settings of what is measured."""
    pipeline = PipelineArguments(n_microbatches=8, balance="layers", **SETTINGS[name])  # type: ignore[arg-type]
    return PipelineTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=1,
        per_device_train_batch_size=ROWS,
        pipeline=pipeline,
        transformer_layers_path="layers",
        save_strategy="no",
        use_cpu=True,
    )


class Measured(PipelineParallelism):
    """Notes the most that torch's allocator has given out at a time in the passes of the first step.

    What it receives into is allocated there, and kept.
    """

    peak = 0

    def forward_backward(
        self, batch: Batch, loss: TokenLoss, args: TrainingArguments, *, divisor: Tensor, last: bool
    ) -> Tensor:
        """Take a batch through the pipeline."""
        with profile(profile_memory=True) as seen:
            total = super().forward_backward(batch, loss, args, divisor=divisor, last=last)
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


def allocated(env: DistributedEnvInterface, folder: Path) -> object:
    """Bytes in the passes of a step, gradients among them."""
    found = {}
    for name in SETTINGS:
        parallel = Measured(env)
        args = arguments(folder / name, name)
        trainer = PipelineTrainer(
            args, model_init=Deep, train_dataset=Rows(), callbacks=[], parallelism=parallel
        )
        trainer.train()
        found[name] = {"rank": parallel.pipeline_rank, "peak": parallel.peak}
    return found


SCENARIOS: dict[str, Scenario] = {"allocated": allocated}
