"""Two ranks that divide each layer: what they do not divide stays equal, and so do the texts they write."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from dataloader_dispatch import DataError
from trainer_core import BuiltModel, DataParallelArguments, ModelTransform, Trainer

FOLDER, RANK = Path(os.environ["FOLDER"]), int(os.environ["RANK"])


class Model(nn.Module):
    """Drops out hidden states that no rank divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.embed(input_ids), 0.5, self.training)
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))


class Divided(ModelTransform):
    """Columns of the first layer and rows of the second one."""

    axis: ClassVar[str] = "tensor"

    def apply(self, built: BuiltModel) -> None:
        meshes = built.ranks.meshes
        if meshes is not None:
            parallelize_module(
                built.model, meshes.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Draws random numbers, as one does that masks or crops; only the rank that reads the data calls it.

    For so long that it still draws while the first steps compute.
    """
    for _ in range(50):
        torch.rand(3)
        time.sleep(0.002)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def own(seed: int) -> list[float] | str:
    """Losses of divided layers where each rank reads for itself, in an order of its own seed; or an error."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 6).view(64, 6) % 7]
    args = DataParallelArguments(
        output_dir=str(FOLDER / "own"),
        overwrite_output_dir=True,
        mesh="tp=2",
        use_cpu=True,
        dispatch_batches=False,
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        save_strategy="no",
    )
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(rows, batch_size=4, shuffle=True, generator=order)  # type: ignore[arg-type]
    trainer = Trainer(
        args, parallel=[Divided()], model_init=Model, train_dataset=loader, eval_dataset=rows, callbacks=[]
    )
    try:
        trainer.train()
    except DataError as error:
        return str(error)
    trainer.evaluate()
    return [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]


def main() -> None:
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 6).view(64, 6) % 7]
    args = DataParallelArguments(
        output_dir=str(FOLDER / "run"),
        mesh="tp=2",
        use_cpu=True,
        seed=3,
        seed_per_rank=True,
        learning_rate=0.1,
        max_steps=6,
        per_device_train_batch_size=4,
        save_strategy="no",
    )
    trainer = Trainer(
        args, parallel=[Divided()], model_init=Model, train_dataset=rows, data_collator=collate, callbacks=[]
    )
    trainer.train()
    model = trainer.model
    torch.rand(RANK + 1)  # as where only one rank reads data
    with trainer.generating():
        text = torch.tensor([[1, 2]])
        for _ in range(20):
            drawn = torch.multinomial(model(text)[:, -1].softmax(-1), 1)
            text = torch.cat([text, drawn], dim=1)
    undivided = {name: value.tolist() for name, value in (*model.embed.named_parameters(),)}
    notes = {"embed": undivided, "text": text.tolist(), "own": own(5)}
    notes["apart"] = own(6 + RANK)
    (FOLDER / f"notes-{RANK}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    store = dist.FileStore(str(FOLDER / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2, timeout=timedelta(seconds=120))
    main()
    dist.destroy_process_group()
