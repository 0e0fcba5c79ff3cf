"""The contenders of the data-parallel benchmark: every one trains the same work on all ranks.

All of them: next-token cross-entropy averaged over the tokens of the step, AdamW with a learning rate of 1e-3
that falls linearly to 0 and no weight decay, gradients clipped to a norm of 1, one pass over the examples in
order. What differs is in ``Contender``: the optimizer's implementation, where batches come from, and what is
logged. A hand-written loop logs the mean loss over the ranks, as ours and Hugging Face Trainer do by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from _ddp_peers import accelerate, fabric, hf_trainer, lightning, mean_over_ranks
from _ddp_work import RankWork
from _step_contenders import Contender, ReadyLoader
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, Example, mean_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from trainer_ddp import DDPTrainer, DDPTrainingArguments


def bare(work: RankWork, model: nn.Module, *, fused: bool | None = None, views: bool = False) -> None:
    """The loop that everybody writes: wrapper, sampler, schedule, clipping, and a line every 50 steps."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = AdamW(wrapped.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / work.steps)
    total = torch.zeros(())
    wrapped.train()  # type: ignore[no-untyped-call]
    for number, batch in enumerate(work.rank_loader(), start=1):
        if not _backward(wrapped, batch, number, total, work):
            continue
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        _log(number // work.accumulation, total, norm, optimizer, work)


def tuned(work: RankWork, model: nn.Module) -> None:
    """A bare loop without idle work: fused AdamW, bucket views, no scheduler object, batches in memory."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters = list(wrapped.parameters())
    optimizer = AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    total = torch.zeros(())
    wrapped.train()  # type: ignore[no-untyped-call]
    for number, batch in enumerate(work.rank_batches(), start=1):
        if not _backward(wrapped, batch, number, total, work):
            continue
        step = number // work.accumulation
        norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / work.steps)
        _log(step, total, norm, optimizer, work)


def _backward(
    wrapped: DistributedDataParallel, batch: Example, number: int, total: torch.Tensor, work: RankWork
) -> bool:
    """Forward and backward of one microbatch; whether it is the last one of its step."""
    last = number % work.accumulation == 0
    with nullcontext() if last else wrapped.no_sync():
        loss = mean_loss(wrapped(batch["input_ids"]), batch["labels"])
        # Nobody divides by one.
        (loss if work.accumulation == 1 else loss / work.accumulation).backward()  # type: ignore[no-untyped-call]
    total += loss.detach()
    return last


def _log(step: int, total: torch.Tensor, norm: torch.Tensor, optimizer: Optimizer, work: RankWork) -> None:
    if step % LOG_EVERY == 0:
        mean = mean_over_ranks(total, work)
        if work.env.rank == 0:
            print(step, mean, norm.item(), optimizer.param_groups[0]["lr"])


def ours(
    work: RankWork,
    model: nn.Module,
    *,
    dispatch: bool = True,
    ready: bool = False,
    fused: bool = True,
    silent: bool = False,
) -> None:
    """`trainer_ddp.DDPTrainer` with its default settings, and with its default callbacks unless silent."""
    size = work.size.batch_size
    settings: dict[str, Any] = {} if ready else {"dataloader_shuffle": False}
    if fused:
        settings["learning_rate"] = LEARNING_RATE
    args = DDPTrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=work.accumulation,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        resume_from_checkpoint=False,
        dispatch_batches=dispatch,
        **settings,
    )
    data: object = work.examples if dispatch else work.rank_examples()
    if ready:
        data = ReadyLoader(work.batches if dispatch else work.rank_batches(), size)
    DDPTrainer(
        args,
        model=model,
        train_dataset=data,
        distributed_env=work.env,
        optimizer_factory=None if fused else _default_adamw,
        callbacks=[] if silent else None,
    ).train()


def _default_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    parameters = [parameter for _, parameter in named_parameters]
    return AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def _contender(
    label: str,
    train: Callable[[RankWork, nn.Module], object],
    optimizer: str,
    data: str,
    logs: str = "mean loss, norm, rate",
) -> Contender:
    # Whoever runs these contenders has a RankWork.
    return Contender(label, cast("Any", train), optimizer, data, logs, ours=label.startswith("trainer-ddp"))


_SPEED = "mean loss, norm, rate, speed"
BARE = _contender("bare DDP", bare, "default", "DataLoader")
BARE_FUSED = _contender("bare DDP, fused AdamW", partial(bare, fused=True, views=True), "fused", "DataLoader")
CONTENDERS = (
    BARE,
    BARE_FUSED,
    _contender("bare DDP, tuned", tuned, "fused", "in memory"),
    _contender("trainer-ddp", ours, "fused", "rank 0's loader, dispatched", _SPEED),
    _contender(
        "trainer-ddp, no callbacks", partial(ours, silent=True), "fused", "rank 0's loader, dispatched", "-"
    ),
    _contender("trainer-ddp, no dispatch", partial(ours, dispatch=False), "fused", "its own loader", _SPEED),
    _contender(
        "trainer-ddp, no dispatch, batches in memory",
        partial(ours, dispatch=False, ready=True),
        "fused",
        "in memory",
        _SPEED,
    ),
    _contender(
        "trainer-ddp, no dispatch, default AdamW",
        partial(ours, dispatch=False, fused=False),
        "default",
        "its own loader",
        _SPEED,
    ),
    _contender("Accelerate", accelerate, "default", "DataLoader"),
    _contender("Lightning Fabric", fabric, "default", "DataLoader"),
    _contender("Hugging Face Trainer", hf_trainer, "fused", "its own loader"),
    _contender("Lightning, barebones", partial(lightning, logs=False), "default", "DataLoader", "nothing"),
    _contender("Lightning, self.log", lightning, "default", "DataLoader", "last loss of rank 0"),
)
