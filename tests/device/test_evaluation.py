"""Evaluation on the fake device: the CPU's figures, and batches that no host waits for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_env import StaticDistributedEnvironment
from llama_pretrain.arguments import PretrainArguments
from llama_pretrain.data import evaluation_loader, open_data
from llama_pretrain.tokenizer import ByteTokenizer
from trainer_core import Trainer, TrainingArguments

from .case import SETTINGS, Model, WaitsByBatch, rows

EVALUATES: Mapping[str, Any] = {
    **SETTINGS,
    "max_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 8,
}


class Bytes(Model):
    """The same over the tokens of a byte tokenizer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 32)
        self.head = nn.Linear(32, 512)


def streamed(directory: Path, device: torch.device) -> Any:
    """The loader that llama-pretrain evaluates with."""
    (directory / "text.txt").write_text("some text to evaluate, and some more of it\n" * 40)
    args = PretrainArguments(
        output_dir=str(directory / "run"),
        data=str(directory / "text.txt"),
        sequence_length=32,
        per_device_eval_batch_size=8,
    )
    return evaluation_loader(
        open_data(args), ByteTokenizer(), args, StaticDistributedEnvironment(device=device)
    )


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_evaluation_waits_for_no_batch(kind: str, tmp_path: Path) -> None:
    evaluated, pinned = [], set()
    base: type[Model] = Bytes if kind == "stream" else Model

    class Looks(base):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            pinned.add((self.training, input_ids.is_pinned()))
            return super().forward(input_ids)

    for name in ("cpu", "cuda:0"):
        device, watch = torch.device(name), WaitsByBatch()
        data = streamed(tmp_path, device) if kind == "stream" else rows(40)
        trainer = Trainer(
            TrainingArguments(output_dir=str(tmp_path / device.type), device=name, **EVALUATES),
            model_init=Looks,
            train_dataset=rows(),
            eval_dataset=data,
            callbacks=[watch],
        )
        trainer.train()
        evaluated.append([entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
        # Two evaluations of five batches of the data set, or of those of the text.
        assert len(watch.by_batch) >= 8
        assert [waits for waits in watch.by_batch if waits] == []
        # Where the model is on the host, nothing is gained by batches in page-locked memory.
        assert pinned == {(True, False), (False, False)}
    assert len(evaluated[0]) == 2
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
