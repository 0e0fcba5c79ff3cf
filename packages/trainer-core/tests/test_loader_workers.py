"""No worker process of a loader lives when `train()` has returned, however it ended, and nothing is lost."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import DocumentStream, TokenDocuments, build_loader
from trainer_core import Trainer

ITEMS = [{"input_ids": torch.full((4,), n), "labels": torch.full((4,), n)} for n in range(16)]


class Seen(torch.nn.Module):
    """A next-token model of 16 tokens that remembers what it was trained on."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 16))
        self.rows: list[int] = []
        self._fails_at = fails_at

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        if self.training:
            if len(self.rows) == self._fails_at:
                raise FloatingPointError("on purpose")
            self.rows += input_ids[:, 0].tolist()
        return self.weight[input_ids]


def stream() -> DocumentStream:
    documents = TokenDocuments([[n] * 3 for n in range(1, 16)])
    return DocumentStream(documents, sequence_length=4, eos_token_id=0, shuffle=False)


DATA: dict[str, Any] = {
    "list": lambda: ITEMS,
    "stream": stream,
    "torch": lambda: DataLoader(ITEMS, 2, num_workers=1),  # type: ignore[arg-type]
    "torch, persistent": lambda: DataLoader(ITEMS, 2, num_workers=1, persistent_workers=True),  # type: ignore[arg-type]
    "torchdata": lambda: StatefulDataLoader(ITEMS, 2, num_workers=1),
    "ours": lambda: build_loader(ITEMS, 2, num_workers=1, persistent_workers=True),  # type: ignore[type-var]
}


def trainer_of(folder: Path, data: object, model: Seen, **settings: object) -> Trainer:
    args: dict[str, object] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "dataloader_num_workers": 1 if data is ITEMS or isinstance(data, DocumentStream) else 0,
        "dataloader_shuffle": False,
        "max_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "resume_from_checkpoint": False,
        **settings,
    }
    return Trainer(args, model=model, train_dataset=data, eval_dataset=ITEMS[:6], callbacks=[])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DATA)
def test_no_worker_is_left_and_the_position_is(name: str, tmp_path: Path) -> None:
    data = DATA[name]()
    model = Seen()
    trainer = trainer_of(tmp_path / "run", data, model, eval_strategy="steps", eval_steps=1, max_eval_steps=1)
    trainer.train()
    assert multiprocessing.active_children() == []
    trainer.state.max_steps = 4
    trainer.train()
    assert multiprocessing.active_children() == []
    undisturbed = Seen()
    trainer_of(tmp_path / "whole", DATA[name](), undisturbed, max_steps=4, max_eval_steps=1).train()
    if name.startswith("torch,") or name == "torch":
        assert model.rows[:4] == undisturbed.rows[:4]  # has no position
    else:
        assert model.rows == undisturbed.rows

    with pytest.raises(FloatingPointError) as caught:  # whose traceback holds what the frames hold
        trainer_of(tmp_path / "failed", DATA[name](), Seen(fails_at=2)).train()
    assert multiprocessing.active_children() == []
    del caught
