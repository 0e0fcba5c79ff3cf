"""A model whose time is waiting, and what the ranks of a pipeline wait for one another while they train it.

Every block sleeps: in its forward pass, in the backward pass for its input, and in that for its weight, each
time equally long. So several ranks fit on few cores, and passes take as long as the textbook assumes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_env import DistributedEnvInterface
from trainer_core import BuiltModel, Trainer
from trainer_pipeline import PipelineArguments, PipelineStages, PipelineTrainingArguments

RANKS, BLOCKS, MICROBATCHES = 4, 8, 8
VOCABULARY, WIDTH, POSITIONS = 16, 8, 4
LEFT_OUT = 2
"""Steps at the beginning that do not count: what is used first is imported in them."""


class _WaitForInput(torch.autograd.Function):
    """The identity; its forward and its backward pass take a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """The same values."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        time.sleep(ctx.seconds)
        return grad, None


class _WaitForWeight(torch.autograd.Function):
    """The identity; only its backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        """The same values."""
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        time.sleep(ctx.seconds)
        return grad, None


class WaitingBlock(nn.Module):
    """Multiplies by a weight.

    Weight and input meet in the product alone. So the gradient for the input is computed without passing what
    waits for the weight, and the other way round.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        x = _WaitForInput.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        product: Tensor = x * _WaitForWeight.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return product


class Waiting(nn.Module):
    """Embedding, blocks and head.

    Args:
        seconds: That each pass of each block takes.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(WaitingBlock(seconds) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x: Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class _Rows:
    """Batches with a row for each microbatch."""

    batch_size = MICROBATCHES

    def __init__(self, batches: int) -> None:
        self.ids = torch.arange(batches * MICROBATCHES * POSITIONS).view(-1, POSITIONS) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in torch.split(self.ids, self.batch_size):
            yield {"input_ids": ids, "labels": ids}


class _RecordedStages(PipelineStages):
    """Stages that note what they compute.

    Args:
        recorded: Gets every schedule that was carried out.
    """

    def __init__(self, recorded: list[Any]) -> None:
        super().__init__()
        self._recorded = recorded

    def apply(self, built: BuiltModel) -> None:
        """Cut the model."""
        super().apply(built)
        executor: Any = built.executor
        executor.timer.recording = self._recorded


def measure(
    env: DistributedEnvInterface, *, schedule: str, steps: int, milliseconds: float, directory: str
) -> dict[str, Any]:
    """Train some steps by a schedule.

    Args:
        env: This rank.
        schedule: Its name.
        steps: Those that count.
        milliseconds: That each of the three passes of a microbatch takes on a rank.
        directory: Where the trainer may write.

    Returns:
        The share of waiting that the log has for each step, and what this rank did in each: its begin on the
        clock of the host, and for each pass stage, kind, microbatch, start and end.
    """
    seconds = milliseconds / 1e3 * RANKS / BLOCKS
    count = LEFT_OUT + steps
    args = PipelineTrainingArguments(
        output_dir=str(Path(directory) / "bubble"),
        use_cpu=True,
        seed=0,
        per_device_train_batch_size=MICROBATCHES,
        max_steps=count,
        logging_steps=1,
        save_strategy="no",
        resume_from_checkpoint=False,
        pipeline=PipelineArguments(schedule=schedule, n_microbatches=MICROBATCHES, balance="layers"),
    )
    recorded: list[Any] = []
    trainer = Trainer(
        args,
        model_init=lambda: Waiting(seconds),
        train_dataset=_Rows(count),
        distributed_env=env,
        callbacks=[],
        parallel=[_RecordedStages(recorded)],
    )
    trainer.train()
    shares = [entry["bubble_share"] for entry in trainer.state.log_history if "bubble_share" in entry]
    if len(shares) != count or len(recorded) != count:
        raise ValueError(f"{count} steps gave {len(shares)} log entries and {len(recorded)} recorded steps")
    return {
        "bubble_share": shares[LEFT_OUT:],
        "steps": [(step.began, [tuple(work) for work in step.work]) for step in recorded[LEFT_OUT:]],
    }
