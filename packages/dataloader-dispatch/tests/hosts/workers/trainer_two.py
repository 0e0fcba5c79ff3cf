"""Ranks under transformers' Trainer: train to a step, perhaps from a checkpoint, and report its documents."""

import gc
import json
import sys
from pathlib import Path

import torch
from documents import loader, numbers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dataloader_dispatch import set_train_loader

folder, steps, accumulate, resume = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "resume"
seen = []


class Watched(Trainer):
    def training_step(self, model, inputs, *rest, **more):
        seen.append([self.state.global_step, numbers(inputs)])
        return super().training_step(model, inputs, *rest, **more)


args = TrainingArguments(
    output_dir=folder,
    max_steps=steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=accumulate,
    lr_scheduler_type="constant",  # the shorter run has the same rates
    save_steps=2,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
trainer = Watched(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), args)
set_train_loader(trainer, loader(rank=args.process_index, world_size=args.world_size))
trainer.train(resume_from_checkpoint=(sys.argv[5] if len(sys.argv) > 5 else True) if resume else None)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
Path(folder, f"seen{args.process_index}.json").write_text(json.dumps([seen, losses]))
# With the model goes the last that holds the process group, whose threads are joined then. A thread that lets
# go of tensors while Python ends aborts the process ("terminate called without an active exception").
del trainer
gc.collect()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
