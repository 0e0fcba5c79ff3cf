"""The contender of this repository: `trainer_core.Trainer` with its default callbacks."""

from __future__ import annotations

from torch import nn

from dist_env import StaticDistributedEnvironment
from trainer_core import Trainer, TrainingArguments

from .options import LOG_EVERY
from .work import CLIP_NORM, LEARNING_RATE, Work


def train(work: Work, model: nn.Module) -> None:
    """Train as `llama-pretrain train` does, with this work's rows, and without checkpoints."""
    args = TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.batch_size,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        mixed_precision=work.args.mixed_precision,
        torch_compile=work.args.torch_compile,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        resume_from_checkpoint=False,
        dataloader_shuffle=False,
    )
    environment = StaticDistributedEnvironment(device=work.device)
    Trainer(args, model=model, train_dataset=work.examples, distributed_env=environment).train()
