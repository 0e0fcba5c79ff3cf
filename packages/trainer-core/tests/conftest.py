"""A tiny model with dropout, ragged batches, and a trainer over both."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor, nn

from dist_env import forget_warnings
from trainer_core import Trainer, TrainingArguments

VOCABULARY = 23


class TinyModel(nn.Module):
    """Embedding, one mixing layer and a head; enough for a loss that depends on everything."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        positions = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
        past = hidden.cumsum(dim=1) / positions.unsqueeze(-1)
        return self.head(self.dropout(torch.tanh(self.mix(past))))


class RaggedLoader:
    """Batches in a fixed order whose rows count unequal numbers of tokens; keeps its position."""

    def __init__(self, rows: int = 24, batch_size: int = 4, length: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        self.labels = self.ids.clone()
        for row in range(rows):
            self.labels[row, int(torch.randint(0, length + 1, (), generator=generator)) :] = -100
        self.batch_size = batch_size
        self.epoch = 0
        self.row = 0

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.row < len(self.ids):
            rows = slice(self.row, self.row + self.batch_size)
            self.row = min(self.row + self.batch_size, len(self.ids))
            yield {"input_ids": self.ids[rows], "labels": self.labels[rows]}
        self.epoch, self.row = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.row = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.row = state["epoch"], state["row"]


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(tmp_path: Path) -> MakeTrainer:
    """Builds a trainer that logs every step; `with_trainer` goes to `Trainer`, the rest to its arguments."""

    def make(
        *,
        loader: RaggedLoader | None = None,
        eval_loader: RaggedLoader | None = None,
        dropout: float = 0.0,
        callbacks: list[object] | None = None,
        with_trainer: dict[str, object] | None = None,
        **settings: object,
    ) -> Trainer:
        loader = RaggedLoader() if loader is None else loader
        given = {
            "output_dir": str(tmp_path / "run"),
            "seed": 7,
            "per_device_train_batch_size": loader.batch_size,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
        } | settings
        return Trainer(
            TrainingArguments(**given),  # type: ignore[arg-type]
            model_init=lambda: TinyModel(dropout),
            train_dataset=loader,
            eval_dataset=eval_loader,
            callbacks=callbacks or [],
            **(with_trainer or {}),  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def ragged_loader() -> type[RaggedLoader]:
    return RaggedLoader


@pytest.fixture
def tiny_model() -> type[TinyModel]:
    return TinyModel


@pytest.fixture
def curve() -> Callable[[Trainer], list[tuple[float, float]]]:
    """Loss and gradient norm of every logged step."""

    def read(trainer: Trainer) -> list[tuple[float, float]]:
        return [
            (float(entry["loss"]), float(entry["grad_norm"]))  # type: ignore[arg-type]
            for entry in trainer.state.log_history
            if "loss" in entry
        ]

    return read


@pytest.fixture(autouse=True)
def _every_warning_is_heard() -> None:
    """Each is given once a process; which tests ran before in it must not matter."""
    forget_warnings()
