"""The contenders of the metrics benchmark: trainers that log, with and without what shows their entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import transformers
from _step_work import CLIP_NORM, LEARNING_RATE, Example, Work, mean_loss
from lightning import LightningModule
from lightning import Trainer as LightningTrainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dist_env import StaticDistributedEnvironment
from perf_metrics import DefaultMetrics, JsonLogger, PeakMemory, ProgressCallback
from trainer_core import Trainer, TrainingArguments

PEAK = 1e12
"""FLOP/s that utilization is computed against; any known number costs the same."""
LOGGING_STEPS = (1, 10, 20)
OURS, HF, LIGHTNING = "trainer-core", "Hugging Face Trainer", "Lightning"


@dataclass(frozen=True)
class Contender:
    """A trainer at a log interval.

    Attributes:
        trainer: `OURS`, `HF` or `LIGHTNING`.
        every: Optimizer steps between log entries; None: it logs nothing.
        shows: Whether entries are shown and stored by the callbacks under test.
        train: Trains a model on some work.
    """

    trainer: str
    every: int | None
    shows: bool
    train: Callable[[Work, nn.Module], object]

    @property
    def label(self) -> str:
        """Its name in the results."""
        return f"{self.trainer}, {'with' if self.shows else 'without'}, every {self.every}"


def ours(work: Work, model: nn.Module, *, every: int | None, shows: bool) -> None:
    """`trainer_core.Trainer`, with all callbacks of perf-metrics or with none."""
    with (work.directory / "lines.txt").open("w") as lines:
        Trainer(
            arguments(work, every),
            model=model,
            train_dataset=work.examples,
            distributed_env=StaticDistributedEnvironment(),
            callbacks=[
                PeakMemory(),
                DefaultMetrics(),
                ProgressCallback(use_tqdm=False, output_stream=lines),
                JsonLogger(),
            ]
            if shows
            else [],
        ).train()


def arguments(work: Work, every: int | None, **further: Any) -> TrainingArguments:
    """The arguments of ours: those of the step benchmark, and a peak."""
    return TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.size.batch_size,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        logging_strategy="no" if every is None else "steps",
        logging_steps=every or 1,
        save_strategy="no",
        resume_from_checkpoint=False,
        dataloader_shuffle=False,
        **{"peak_hardware_flops": PEAK, **further},
    )


def hf_trainer(work: Work, model: nn.Module, *, every: int, shows: bool) -> None:
    """Hugging Face Trainer; what shows entries is its default, a bar that also prints them."""
    args = transformers.TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.size.batch_size,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        logging_steps=every,
        save_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, args, train_dataset=work.examples, compute_loss_func=_loss_for_hf)
    if not shows:
        trainer.remove_callback(transformers.ProgressCallback)
    trainer.train()


def _loss_for_hf(outputs: Tensor, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    return mean_loss(outputs, labels)


class _Module(LightningModule):
    """The model with its loss, its log entry and its optimizer, as Lightning wants them."""

    def __init__(self, work: Work, model: nn.Module, shows: bool) -> None:
        super().__init__()
        self._work = work
        self._shows = shows
        self.model = model

    def training_step(self, batch: Example, batch_index: int) -> Tensor:
        """Loss of a batch."""
        loss = mean_loss(self.model(batch["input_ids"]), batch["labels"])
        self.log("loss", loss, prog_bar=self._shows)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, and a schedule that is stepped with it."""
        optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / self._work.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lightning(work: Work, model: nn.Module, *, every: int, shows: bool) -> None:
    """Lightning Trainer with `self.log`; what shows entries are its tqdm bar and its CSV logger."""
    LightningTrainer(
        accelerator="cpu",
        devices=1,
        max_steps=work.steps,
        gradient_clip_val=CLIP_NORM,
        default_root_dir=str(work.directory),
        log_every_n_steps=every,
        logger=CSVLogger(str(work.directory)) if shows else False,
        callbacks=[TQDMProgressBar()] if shows else [],
        enable_progress_bar=shows,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(_Module(work, model, shows), work.loader())


TRAINERS: dict[str, Callable[..., None]] = {OURS: ours, HF: hf_trainer, LIGHTNING: lightning}


def groups(peers_at: Sequence[int]) -> list[list[Contender]]:
    """Those that are compared: with and without, by trainer and interval; ours without any entry beside."""
    chosen = []
    for trainer, train in TRAINERS.items():
        for every in LOGGING_STEPS if trainer == OURS else peers_at:
            chosen.append(
                [
                    Contender(trainer, every, shows, partial(train, every=every, shows=shows))
                    for shows in (False, True)
                ]
            )
    chosen[0].append(Contender(OURS, None, False, partial(ours, every=None, shows=False)))
    return chosen
