"""Ranks under Lightning: train to a step, perhaps from a checkpoint, and report its documents."""

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from documents import loader, numbers

from dataloader_dispatch import LightningLoader

folder, steps, ranks, resume = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
saved, limit = [*sys.argv[5:], "", ""][:2]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(1, 1), []

    def train_dataloader(self):
        return LightningLoader(loader(rank=self.trainer.global_rank, world_size=ranks), uneven="pad")

    def training_step(self, batch, batch_idx):
        self.seen.append([self.global_step, self.current_epoch, numbers(batch)])
        return self.net(batch["input_ids"][:, :1].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


module = Module()
trainer = pl.Trainer(
    default_root_dir=folder,
    max_steps=steps,
    limit_train_batches=int(limit) if limit else None,
    callbacks=[pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=-1)],
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, ckpt_path=(saved or "last") if resume else None)
Path(folder, f"seen{trainer.global_rank}.json").write_text(json.dumps(module.seen))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
