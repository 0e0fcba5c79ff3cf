"""One rank of two: trains under `transformers.Trainer`, then under Lightning, with the callbacks of both."""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from perf_metrics import DefaultMetrics, JsonLogger
from perf_metrics.callbacks.device_metrics import PeakMemory
from perf_metrics.callbacks.lightning import LightningCallbacks
from perf_metrics.callbacks.metrics import IntervalCounts

folder = Path(sys.argv[1])
config = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
rows = [
    {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    for ids in torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(0))
]


class SlowEvaluation(Trainer):
    def prediction_step(self, *arguments, **keywords):
        time.sleep(0.5)
        return super().prediction_step(*arguments, **keywords)


def callbacks() -> list[object]:
    return [PeakMemory(), DefaultMetrics(1e12), JsonLogger()]


def under_transformers() -> None:
    arguments = TrainingArguments(
        output_dir=str(folder / "transformers"),
        max_steps=8,
        per_device_train_batch_size=4,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        include_num_input_tokens_seen="all",
        report_to=[],
        use_cpu=True,
    )
    trainer = SlowEvaluation(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:16],
        callbacks=[IntervalCounts(1000.0), *callbacks()],
    )
    trainer.train()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        # Each rank has a loss of its own, so that a mean over ranks shows.
        return self.model(**batch).loss * 0 + self.global_rank + 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def under_lightning() -> None:
    ours = LightningCallbacks(callbacks(), flops_per_token=1000.0)
    trainer = pl.Trainer(
        default_root_dir=folder / "lightning",
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=8,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[ours],
    )
    trainer.fit(Module(), DataLoader(rows, batch_size=4))


under_transformers()
under_lightning()
# gloo's threads would otherwise be ended by the interpreter's, and abort the process at times.
if dist.is_initialized():
    dist.destroy_process_group()
