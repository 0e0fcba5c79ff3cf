"""The Trainer of Lightning: the model in a module, the loss logged, lines in place of its bar."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import AdamW

from .options import LOG_EVERY
from .work import CLIP_NORM, LEARNING_RATE, Example, Work, mean_loss


def train(work: Work, model: nn.Module) -> None:
    """Train with Lightning."""
    in_bf16 = work.args.mixed_precision == "bf16"
    trainer = Trainer(
        accelerator="cpu" if work.device.type == "cpu" else "auto",
        devices=1,
        precision="bf16-mixed" if in_bf16 else "32-true",
        max_steps=work.steps,
        gradient_clip_val=CLIP_NORM,
        logger=_Lines(),
        log_every_n_steps=LOG_EVERY,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=str(work.directory),
    )
    trainer.fit(_Module(work.compiled(model), fused=not in_bf16), work.loader())


class _Module(LightningModule):
    """The model with its loss and optimizer, as Lightning wants them."""

    def __init__(self, model: nn.Module, fused: bool) -> None:
        super().__init__()
        self.model = model
        self._fused = fused

    def training_step(self, batch: Example, batch_index: int) -> Tensor:
        """Loss of a batch."""
        loss = mean_loss(self.model(batch["input_ids"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """That of all contenders; not fused in mixed precision, where Lightning would not clip then."""
        return AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=self._fused)


class _Lines(Logger):
    """Prints what is logged."""

    name = "lines"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Print a line."""
        print(step, metrics)

    def log_hyperparams(self, *_: object, **__: object) -> None:
        """The module has none."""
