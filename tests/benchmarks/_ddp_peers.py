"""The peers of the data-parallel benchmark, each set up for several ranks as its manual shows.

The process group is there before: Accelerate, Hugging Face Trainer and Lightning take one that they find.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from _ddp_work import RankWork
from _step_peers import _Lines, _Module, _parts
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, mean_loss
from accelerate import Accelerator
from lightning import Fabric
from lightning import Trainer as LightningTrainer
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments


def accelerate(work: RankWork, model: nn.Module) -> None:
    """Accelerate: model, optimizer, schedule and loader prepared; the schedule moves once for each rank."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.accumulation)
    moves = work.steps * work.env.world_size
    optimizer: Any = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule: Any = LambdaLR(optimizer, lambda move: 1 - move / moves)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, work.loader())
    total, step = torch.zeros(()), 0
    model.train()
    for batch in loader:
        # Its context decides when to synchronize; without accumulation its manual leaves it out.
        several = work.accumulation > 1
        accumulating: AbstractContextManager[Any] = (
            accelerator.accumulate(model) if several else nullcontext()
        )
        with accumulating:
            loss = mean_loss(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            total += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % LOG_EVERY == 0:
            mean = mean_over_ranks(total, work)
            accelerator.print(step, mean, norm.item(), schedule.get_last_lr()[0])


def fabric(work: RankWork, model: nn.Module) -> None:
    """Lightning Fabric with its strategy "ddp": model, optimizer and loader set up."""
    runtime = Fabric(
        accelerator="cpu",
        devices=work.env.world_size,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
    )
    runtime.launch()
    optimizer, schedule = _parts(work, model)
    wrapped, wrapped_optimizer = runtime.setup(model, optimizer)
    loader = runtime.setup_dataloaders(work.loader())
    total = torch.zeros(())
    wrapped.train()
    for number, batch in enumerate(loader, start=1):
        last = number % work.accumulation == 0
        with nullcontext() if last else runtime.no_backward_sync(wrapped):
            loss = mean_loss(wrapped(batch["input_ids"]), batch["labels"])
            runtime.backward(loss if work.accumulation == 1 else loss / work.accumulation)
        total += loss.detach()
        if not last:
            continue
        norm: Any = runtime.clip_gradients(wrapped, wrapped_optimizer, max_norm=CLIP_NORM)
        wrapped_optimizer.step()
        schedule.step()
        wrapped_optimizer.zero_grad()
        step = number // work.accumulation
        if step % LOG_EVERY == 0:
            runtime.print(step, mean_over_ranks(total, work), norm.item(), schedule.get_last_lr()[0])


def mean_over_ranks(total: Tensor, work: RankWork) -> float:
    """The mean loss of the steps since the last entry, over all ranks; sets the total back to 0."""
    dist.all_reduce(total)
    mean = total.item() / (LOG_EVERY * work.accumulation * work.env.world_size)
    total.zero_()
    return mean


def hf_trainer(work: RankWork, model: nn.Module) -> None:
    """Hugging Face Trainer with its default optimizer, AdamW fused, and lines in place of its bar.

    Looking for unused parameters is turned off: it is on for models that are not of its library. The model
    says that its labels get shifted, for otherwise the tokens of the step are counted without that.
    """
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    args = TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=work.size.batch_size,
        gradient_accumulation_steps=work.accumulation,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
    )
    Trainer(model, args, train_dataset=work.examples, compute_loss_func=_loss_for_hf).train()


def _loss_for_hf(outputs: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """Sum over the tokens of this microbatch, over the number of tokens of the step on all ranks."""
    total = functional.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def lightning(work: RankWork, model: nn.Module, *, logs: bool = True) -> None:
    """Lightning Trainer with its strategy "ddp": barebones, or logging this rank's loss by ``self.log``.

    The sampler is given, as the one that it puts in place of a loader's own shuffles.
    """
    speaking: dict[str, Any] = {
        "logger": _Lines(),
        "log_every_n_steps": LOG_EVERY,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = LightningTrainer(
        accelerator="cpu",
        devices=work.env.world_size,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        max_steps=work.steps,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=CLIP_NORM,
        default_root_dir=str(work.directory),
        **(speaking if logs else {"barebones": True}),
    )
    trainer.fit(_Module(work, model, logs), work.rank_loader())
