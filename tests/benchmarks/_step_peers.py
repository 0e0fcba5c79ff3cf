"""The peers of the step benchmark: Accelerate, Lightning Fabric, Hugging Face Trainer and Lightning."""

from __future__ import annotations

from typing import Any

import torch
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, Example, Work, mean_loss
from accelerate import Accelerator
from lightning import Fabric, LightningModule
from lightning import Trainer as LightningTrainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments


def _parts(work: Work, model: nn.Module) -> tuple[AdamW, LambdaLR]:
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / work.steps)
    return optimizer, schedule


def accelerate(work: Work, model: nn.Module) -> None:
    """Accelerate: model, optimizer, schedule and loader prepared."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, *_parts(work, model), work.loader())
    total = torch.zeros(())
    model.train()
    for step, batch in enumerate(loader, start=1):
        loss = mean_loss(model(batch["input_ids"]), batch["labels"])
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            accelerator.print(step, total.item() / LOG_EVERY, norm.item(), schedule.get_last_lr()[0])
            total.zero_()


def fabric(work: Work, model: nn.Module) -> None:
    """Lightning Fabric: model, optimizer and loader set up."""
    runtime = Fabric(accelerator="cpu", devices=1)
    optimizer, schedule = _parts(work, model)
    wrapped, wrapped_optimizer = runtime.setup(model, optimizer)
    loader = runtime.setup_dataloaders(work.loader())
    total = torch.zeros(())
    wrapped.train()
    for step, batch in enumerate(loader, start=1):
        loss = mean_loss(wrapped(batch["input_ids"]), batch["labels"])
        runtime.backward(loss)
        norm: Any = runtime.clip_gradients(wrapped, wrapped_optimizer, max_norm=CLIP_NORM)
        wrapped_optimizer.step()
        schedule.step()
        wrapped_optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            runtime.print(step, total.item() / LOG_EVERY, norm.item(), schedule.get_last_lr()[0])
            total.zero_()


def hf_trainer(work: Work, model: nn.Module) -> None:
    """Hugging Face Trainer with its default optimizer, AdamW fused, and lines in place of its bar."""
    args = TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.size.batch_size,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, args, train_dataset=work.examples, compute_loss_func=_loss_for_hf).train()


def _loss_for_hf(outputs: Tensor, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    return mean_loss(outputs, labels)


class _Module(LightningModule):
    """The model with its loss and optimizer, as Lightning wants them."""

    def __init__(self, work: Work, model: nn.Module, logs: bool) -> None:
        super().__init__()
        self._work = work
        self._logs = logs
        self.model = model

    def training_step(self, batch: Example, batch_index: int) -> Tensor:
        """Loss of a batch."""
        loss = mean_loss(self.model(batch["input_ids"]), batch["labels"])
        if self._logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, and a schedule that is stepped with it."""
        optimizer, schedule = _parts(self._work, self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Lines(Logger):
    """Prints what is logged."""

    name = "lines"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Print a line."""
        print(step, metrics)

    def log_hyperparams(self, *_: object, **__: object) -> None:
        """The module has none."""


def lightning(work: Work, model: nn.Module, *, logs: bool = True) -> None:
    """Lightning Trainer: barebones, or logging the loss by ``self.log``."""
    speaking: dict[str, Any] = {
        "logger": _Lines(),
        "log_every_n_steps": LOG_EVERY,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = LightningTrainer(
        accelerator="cpu",
        devices=1,
        max_steps=work.steps,
        gradient_clip_val=CLIP_NORM,
        default_root_dir=str(work.directory),
        **(speaking if logs else {"barebones": True}),
    )
    trainer.fit(_Module(work, model, logs), work.loader())
