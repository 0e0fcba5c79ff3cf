"""Trains a model with experts on rows of many lengths: `unlike_lengths.py FOLDER ACCUMULATION [MESH]`.

It prints loss and gradient norm of every step; `torchrun` starts it on several ranks. Each rank gets two rows
of one length at a time, and in a step one rank may see a length for the first time where the other does not.
"""

from __future__ import annotations

import json
import sys

import torch

from dist_env import ParallelLayout
from llama_pretrain import Llama, preset
from trainer_core import DataParallelArguments, Trainer
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments

LENGTHS = (8, 8, 8, 12, 12, 8, 12, 16)


def main(folder: str, accumulation: int, mesh: str = "") -> None:
    """Train."""
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 256, (length,), generator=drawn) for length in LENGTHS for _ in range(2)]
    in_stages = bool(mesh) and ParallelLayout.parse(mesh).pipeline > 1
    own = {"pipeline": PipelineArguments(n_microbatches=2)} if in_stages else {}
    arguments = PipelineTrainingArguments if in_stages else DataParallelArguments
    args = arguments(
        output_dir=folder,
        mesh=mesh or None,
        use_cpu=True,
        seed=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        dataloader_shuffle=False,
        max_steps=4,
        learning_rate=0.003,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        **own,  # type: ignore[arg-type]
    )
    trainer = (PipelineTrainer if in_stages else Trainer)(
        args,
        model_init=lambda: Llama(preset("mixtral-nano")),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    sys.stdout.write(f"points {json.dumps([[entry['loss'], entry['grad_norm']] for entry in logged])}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
