"""Steps of several batches: their microbatches in one schedule, beside a schedule for each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _pipeline_bubble import BLOCKS, LEFT_OUT, Waiting
from torch import Tensor, nn

from dist_env import DistributedEnvInterface
from trainer_core import Batch, BuiltModel, Executor, ForwardOutput, TokenLoss, Trainer
from trainer_pipeline import PipelineArguments, PipelineStages, PipelineTrainingArguments

RANKS, BATCHES, MICROBATCHES = 2, 4, 4
WAYS = ("one schedule", "four schedules")
MODELS = ("waiting", "computing")
POSITIONS, WIDTH, HIDDEN = 32, 256, 1024
TOLERANCE = 1e-5


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        found: Tensor = x + self.down(self.up(x).relu())
        return found


class Computing(nn.Module):
    """Embedding, blocks and head, of which each rank has work for its core."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x: Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class TimedStages(PipelineStages):
    """Stages whose steps are timed.

    Args:
        apart: Whether each batch gets a schedule of its own.
    """

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self._apart = apart
        self.seconds: list[float] = []
        """Of each step."""

    def apply(self, built: BuiltModel) -> None:
        """Cut the model."""
        super().apply(built)
        built.executor = _Timed(built.executor, self.seconds, apart=self._apart)


class _Timed:
    def __init__(self, executor: Executor, seconds: list[float], *, apart: bool) -> None:
        self._executor = executor
        self._seconds = seconds
        self._apart = apart

    def forward(self, batch: Batch, loss: TokenLoss) -> ForwardOutput | None:
        """Take a batch through the pipeline, forward only."""
        return self._executor.forward(batch, loss)

    def forward_backward(
        self, batches: Sequence[Batch], loss: TokenLoss, *, denominator: Tensor, fire: Callable[[str], object]
    ) -> Tensor:
        """Take the batches of a step through the pipeline."""
        began = time.perf_counter()
        groups = [[batch] for batch in batches] if self._apart else [batches]
        totals = [
            self._executor.forward_backward(group, loss, denominator=denominator, fire=fire)
            for group in groups
        ]
        self._seconds.append(time.perf_counter() - began)
        return torch.stack(totals).sum()


def measure(
    env: DistributedEnvInterface, *, model: str, way: str, steps: int, milliseconds: float, directory: str
) -> dict[str, Any]:
    """Train some steps.

    Args:
        env: This rank.
        model: waiting or computing.
        way: One of `WAYS`.
        steps: Those that count.
        milliseconds: That each of the three passes of a waiting microbatch takes on a rank.
        directory: Where the trainer may write.

    Returns:
        For each step that counts, the share of waiting that the log has and seconds on this rank; the losses.
    """
    count = LEFT_OUT + steps
    args = PipelineTrainingArguments(
        output_dir=str(Path(directory) / "accumulation"),
        use_cpu=True,
        seed=0,
        per_device_train_batch_size=MICROBATCHES,
        gradient_accumulation_steps=BATCHES,
        max_steps=count,
        logging_steps=1,
        save_strategy="no",
        resume_from_checkpoint=False,
        pipeline=PipelineArguments(n_microbatches=MICROBATCHES, balance="layers"),
    )
    stages = TimedStages(apart=way != WAYS[0])
    seconds = milliseconds / 1e3 * RANKS / BLOCKS
    positions = 4 if model == "waiting" else POSITIONS
    ids = torch.arange(count * BATCHES * MICROBATCHES * positions).view(-1, positions) % 16
    trainer = Trainer(
        args,
        model_init=(lambda: Waiting(seconds)) if model == "waiting" else Computing,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        distributed_env=env,
        callbacks=[],
        parallel=[stages],
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "bubble_share" in entry]
    return {
        "bubble_share": [entry["bubble_share"] for entry in log][LEFT_OUT:],
        "seconds": stages.seconds[LEFT_OUT:],
        "losses": [entry["loss"] for entry in log],
    }


def check(told: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Refuse ways that do not train alike.

    Raises:
        ValueError: If losses differ.
    """
    one, other = (told[way][0]["losses"] for way in WAYS)
    if any(abs(a / b - 1) > TOLERANCE for a, b in zip(one, other, strict=True)):
        raise ValueError(f"the two ways have other losses: {one} and {other}")
