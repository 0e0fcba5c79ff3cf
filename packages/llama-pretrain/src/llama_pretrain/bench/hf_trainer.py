"""The Trainer of transformers, with its default optimizer (AdamW, fused) and lines in place of its bar."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from .options import LOG_EVERY
from .work import CLIP_NORM, LEARNING_RATE, Work, mean_loss


def train(work: Work, model: nn.Module) -> None:
    """Train with transformers."""
    args = TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.batch_size,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        bf16=work.args.mixed_precision == "bf16",
        torch_compile=work.args.torch_compile,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=work.device.type == "cpu",
    )
    Trainer(_WithoutConfig(model), args, train_dataset=work.examples, compute_loss_func=_loss).train()


class _WithoutConfig(nn.Module):
    """The model without its `config`, which is frozen and which Trainer would write into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of token ids."""
        logits: Tensor = self.model(input_ids)
        return logits


def _loss(outputs: Tensor, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    return mean_loss(outputs, labels)
