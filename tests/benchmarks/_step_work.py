"""The work of the step benchmark: two models, their data and their loss, the same for every contender.

The model itself keeps the time: its ``forward`` notes the clocks. It is called once per step in every loop,
so the time from one call to a later one is that of whole steps, wherever a loop logs or fetches its data, and
no contender needs a callback of its own that would cost time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

from llama_pretrain import Llama, LlamaConfig
from perf_metrics import model_flops_per_token

LOG_EVERY = 50
"""Steps between two log entries; also the length of a window, so that each holds one entry."""
WARM_UP = 10
"""Steps before the first window."""
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
Example = dict[str, Tensor]


@dataclass(frozen=True)
class Window:
    """Mean milliseconds per step of consecutive steps."""

    cpu: float
    wall: float


@dataclass
class Clock:
    """Notes the clocks at the first call of ``tick``, after the warm-up, and after each window."""

    steps: int = 0
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    first: tuple[float, float] | None = None
    """CPU and wall seconds at the first step."""

    def tick(self) -> None:
        """Count a step that begins."""
        if self.steps == 0:
            self.first = (time.process_time(), time.perf_counter())
        elif (self.steps - WARM_UP) % LOG_EVERY == 0:
            self.note()
        self.steps += 1

    def note(self) -> None:
        """A window ends, and the next one begins."""
        self.cpu.append(time.process_time())
        self.wall.append(time.perf_counter())

    def windows(self) -> list[Window]:
        """What was measured between the notes, oldest first."""
        return [
            Window(
                (self.cpu[at + 1] - self.cpu[at]) / LOG_EVERY * 1e3,
                (self.wall[at + 1] - self.wall[at]) / LOG_EVERY * 1e3,
            )
            for at in range(len(self.cpu) - 1)
        ]


class Nano(nn.Module):
    """Embedding, norm and head: a model with hardly any arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.embedding = nn.Embedding(64, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, 64] of token ids [batch, positions]."""
        self.clock.tick()
        logits: Tensor = self.head(self.norm(self.embedding(input_ids)))
        return logits

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token, of the head alone."""
        return 6.0 * self.head.weight.numel()


class TinyLlama(nn.Module):
    """A Llama of 0.7 million parameters: width 128, 2 layers, vocabulary 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        # Inside: Hugging Face Trainer writes into a model's `config`, and this one is frozen.
        self.llama = Llama(
            LlamaConfig(
                vocab_size=1024,
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=64,
            )
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, 1024] of token ids [batch, positions]."""
        self.clock.tick()
        logits: Tensor = self.llama(input_ids)
        return logits

    def flops_per_token(self, sequence_length: int) -> float | None:
        """Training FLOPs per token of the Llama."""
        return model_flops_per_token(self.llama, sequence_length)


@dataclass(frozen=True)
class Size:
    """A model, and the shape of its batches."""

    name: str
    build: Callable[[], nn.Module]
    vocabulary: int
    batch_size: int
    positions: int


NANO = Size("nano", Nano, 64, 2, 8)
TINY = Size("tiny", TinyLlama, 1024, 4, 64)
SIZES = {size.name: size for size in (NANO, TINY)}


@dataclass(frozen=True)
class Work:
    """What one run trains: steps, and enough examples for them, so that no epoch ends before.

    Attributes:
        size: The model and the shape of its batches.
        steps: Optimizer steps.
        examples: One per row, `input_ids` and `labels` the same.
        batches: The examples in batches, made beforehand.
        directory: Where a contender may write.
    """

    size: Size
    steps: int
    examples: list[Example]
    batches: list[Example]
    directory: Path

    @classmethod
    def of(cls, size: Size, windows: int, directory: Path) -> Work:
        """The work of a warm-up and so many windows."""
        steps = WARM_UP + LOG_EVERY * windows + 1
        generator = torch.Generator().manual_seed(0)
        shape = (steps * size.batch_size, size.positions)
        tokens = torch.randint(size.vocabulary, shape, generator=generator)
        examples = [{"input_ids": row, "labels": row} for row in tokens]
        rows = range(0, len(examples), size.batch_size)
        batches = [default_collate(examples[at : at + size.batch_size]) for at in rows]
        return cls(size, steps, examples, batches, directory)

    def model(self) -> nn.Module:
        """A new model with the same weights each time."""
        torch.manual_seed(0)
        return self.size.build()

    def loader(self) -> Any:
        """A new torch loader of the examples, in order."""
        return DataLoader(cast("Dataset[Example]", self.examples), batch_size=self.size.batch_size)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token, averaged over the tokens of the batch."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
