"""What the workers train: a small model, ragged batches, and notes of what came out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 23
LENGTH = 6


class TinyModel(nn.Module):
    """Embedding, layers that mix each position with those before it, and a head."""

    def __init__(self, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        positions = torch.arange(1, hidden.shape[1] + 1).unsqueeze(-1)
        for layer in self.layers:
            past = hidden.cumsum(dim=1) / positions
            hidden = hidden + self.dropout(torch.tanh(layer(past)))
        return self.head(hidden)


class RaggedLoader:
    """Batches in a fixed order whose rows count unequal numbers of tokens; keeps its position."""

    batch_size = 2

    def __init__(self, rows: int = 22, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for row in range(rows):
            self.labels[row, int(torch.randint(0, LENGTH + 1, (), generator=generator)) :] = -100
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


def settings(output_dir: str, **more: object) -> dict[str, object]:
    """Training arguments that the workers have in common."""
    return {
        "output_dir": output_dir,
        "use_cpu": True,
        "seed": 7,
        "per_device_train_batch_size": RaggedLoader.batch_size,
        "num_train_epochs": -1,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "check_flops": False,  # takes longer than the steps
        **more,
    }


def write_notes(notes: dict[str, object], path: str | None = None) -> None:
    """Tell the test something: into this rank's notes, or another file."""
    Path(path or os.environ["NOTES"]).write_text(json.dumps(notes))


def digest(model: nn.Module) -> str:
    """Equal for models of the same weights, bit for bit."""
    seen = hashlib.sha256()
    for name, value in model.state_dict().items():
        seen.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        seen.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()
