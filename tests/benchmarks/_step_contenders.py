"""The contenders of the step benchmark: every one trains the same work, each in the way its manual shows.

All of them: next-token cross-entropy averaged over the tokens, AdamW with a learning rate of 1e-3 that falls
linearly to 0 and no weight decay, gradients clipped to a norm of 1, one pass over the examples in order. What
differs is in ``Contender``: the optimizer's implementation, where batches come from, and what is logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _step_peers import accelerate, fabric, hf_trainer, lightning
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, Clock, Example, Window, Work, mean_loss
from torch import nn
from torch.optim import AdamW, Optimizer

from dist_env import StaticDistributedEnvironment
from trainer_core import Trainer, TrainingArguments


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        label: Its name in the table.
        train: Trains a model on some work.
        optimizer: "default": AdamW as torch makes it; "fused": AdamW(fused=True).
        data: Where its batches come from.
        logs: What it logs every 50 steps.
    """

    label: str
    train: Callable[[Work, nn.Module], object]
    optimizer: str
    data: str
    logs: str
    ours: bool = False


@dataclass(frozen=True)
class Sample:
    """One run of a contender.

    Attributes:
        windows: Milliseconds per step.
        setup: Milliseconds from its constructor to its first step.
    """

    windows: list[Window]
    setup: Window


class ReadyLoader:
    """Batches made beforehand, with the attributes that a loader needs for `Trainer`."""

    def __init__(self, batches: list[Example], batch_size: int) -> None:
        self.batches = batches
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def plain(work: Work, model: nn.Module, *, fused: bool | None = None) -> None:
    """The loop that everybody writes: loader, schedule, clipping, and a line every 50 steps."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / work.steps)
    total = torch.zeros(())
    model.train()
    for step, batch in enumerate(work.loader(), start=1):
        loss = mean_loss(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            print(step, total.item() / LOG_EVERY, norm.item(), schedule.get_last_lr()[0])
            total.zero_()


def tuned(work: Work, model: nn.Module) -> None:
    """A plain loop without idle work: fused AdamW, no scheduler object, batches in memory."""
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    total = torch.zeros(())
    model.train()
    for step, batch in enumerate(work.batches, start=1):
        loss = mean_loss(model(batch["input_ids"]), batch["labels"])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / work.steps)
        total += loss.detach()
        if step % LOG_EVERY == 0:
            print(step, total.item() / LOG_EVERY, norm.item(), optimizer.param_groups[0]["lr"])
            total.zero_()


def ours(work: Work, model: nn.Module, *, ready: bool = False, fused: bool = True) -> None:
    """`trainer_core.Trainer` with its default callbacks."""
    size = work.size.batch_size
    settings: dict[str, Any] = {} if ready else {"dataloader_shuffle": False}
    if fused:
        settings["learning_rate"] = LEARNING_RATE
    args = TrainingArguments(
        output_dir=str(work.directory),
        max_steps=work.steps,
        per_device_train_batch_size=size,
        max_grad_norm=CLIP_NORM,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        resume_from_checkpoint=False,
        **settings,
    )
    Trainer(
        args,
        model=model,
        train_dataset=ReadyLoader(work.batches, size) if ready else work.examples,
        distributed_env=StaticDistributedEnvironment(),
        optimizer_factory=None if fused else _default_adamw,
    ).train()


def _default_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    parameters = [parameter for _, parameter in named_parameters]
    return AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


_EVERYTHING = "mean loss, norm, rate"
PLAIN = Contender("plain loop", plain, "default", "DataLoader", _EVERYTHING)
PLAIN_FUSED = Contender(
    "plain loop, fused AdamW", partial(plain, fused=True), "fused", "DataLoader", _EVERYTHING
)
CONTENDERS = (
    PLAIN,
    PLAIN_FUSED,
    Contender("plain loop, tuned", tuned, "fused", "in memory", _EVERYTHING),
    Contender("trainer-core", ours, "fused", "its own loader", f"{_EVERYTHING}, speed", ours=True),
    Contender(
        "trainer-core, batches in memory",
        partial(ours, ready=True),
        "fused",
        "in memory",
        f"{_EVERYTHING}, speed",
        ours=True,
    ),
    Contender(
        "trainer-core, default AdamW",
        partial(ours, fused=False),
        "default",
        "its own loader",
        f"{_EVERYTHING}, speed",
        ours=True,
    ),
    Contender("Accelerate", accelerate, "default", "DataLoader", _EVERYTHING),
    Contender("Lightning Fabric", fabric, "default", "DataLoader", _EVERYTHING),
    Contender("Hugging Face Trainer", hf_trainer, "fused", "its own loader", _EVERYTHING),
    Contender("Lightning, barebones", partial(lightning, logs=False), "default", "DataLoader", "nothing"),
    Contender("Lightning, self.log", lightning, "default", "DataLoader", "last loss"),
)


def measure(contender: Contender, work: Work) -> tuple[Sample, nn.Module]:
    """Train a new model once; returns the times and the trained model."""
    model = work.model()
    clock: Clock = model.clock  # type: ignore[assignment]
    cpu, wall = time.process_time(), time.perf_counter()
    contender.train(work, model)
    if clock.first is None or clock.steps != work.steps:
        raise RuntimeError(f"{contender.label} made {clock.steps} steps of {work.steps}")
    setup = Window((clock.first[0] - cpu) * 1e3, (clock.first[1] - wall) * 1e3)
    return Sample(clock.windows(), setup), model
