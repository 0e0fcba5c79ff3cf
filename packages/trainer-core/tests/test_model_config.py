"""A model whose weights fit a checkpoint, but which computes something else by its configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trainer_core import Trainer, TrainingArguments

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(16, 6) % 11]
SAID = "changed since the checkpoint, and changes the curve from here on"


class Model(nn.Module):
    """Its configuration names what stands between its layers, as those of Hugging Face do."""

    def __init__(self, **config: object) -> None:
        super().__init__()
        values = {"slope": 0.1, "scaling": {"factor": 2}, "transformers_version": "5.0", "ids": {0: "a"}}
        self.config = SimpleNamespace(to_dict=lambda: values | config)
        self.slope = float(str((values | config)["slope"]))
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(nn.functional.leaky_relu(self.embed(input_ids), self.slope))


def train(folder: Path, steps: int, **config: object) -> None:
    args = TrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, max_steps=steps, lr_scheduler_type="constant"
    )
    Trainer(args, model_init=lambda: Model(**config), train_dataset=ROWS, callbacks=[]).train()


def test_what_it_computes_otherwise_is_told_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 1)
    train(tmp_path, 2, transformers_version="5.1", use_cache=False, later=1)
    assert not [line for line in caplog.messages if SAID in line]
    train(tmp_path, 3, slope=0.5, scaling={"factor": 4})
    assert [line.partition(f"{SAID}: ")[2] for line in caplog.messages if SAID in line] == [
        "config.scaling of the model: {'factor': 2} before, {'factor': 4} now",
        "config.slope of the model: 0.1 before, 0.5 now",
    ]
    caplog.clear()
    train(tmp_path, 4, slope=0.5, scaling={"factor": 4})
    assert not [line for line in caplog.messages if SAID in line]
