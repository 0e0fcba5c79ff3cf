"""Every schedule gives the learning rates of transformers, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from transformers import get_scheduler

from trainer_core import TrainingArguments
from trainer_core.optimization import build_schedule

STEPS, WARMUP, RATE = 100, 7, 3e-3
CASES = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 20}),
    ("cosine_with_min_lr", {"min_lr": 3e-4}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.0}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4, "warmup_lr_rate": 0.05, "num_cycles": 0.75}),
    ("warmup_stable_decay", {"num_decay_steps": 30}),
    ("warmup_stable_decay", {"num_decay_steps": 20, "num_stable_steps": 40, "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 30, "warmup_type": "cosine", "decay_type": "linear"}),
    ("warmup_stable_decay", {"num_decay_steps": 30, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 30, "min_lr_ratio": 0.05, "num_cycles": 1.0}),
]


def optimizer() -> SGD:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return SGD([{"params": [first]}, {"params": [second], "lr": RATE / 10}], lr=RATE)


def rates(scheduler, made, steps):
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in made.param_groups])
        made.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rates_of_transformers(name, options, warmup):
    theirs, ours = optimizer(), optimizer()
    expected = get_scheduler(
        name,
        theirs,
        num_warmup_steps=warmup,
        num_training_steps=STEPS,
        scheduler_specific_kwargs=dict(options),
    )
    kept = 0 if name == "constant" else warmup
    args = TrainingArguments(
        learning_rate=RATE, lr_scheduler_type=name, lr_scheduler_kwargs=options, warmup_steps=kept
    )
    # A few steps past the end as well.
    assert rates(build_schedule(args, ours, STEPS), ours, STEPS + 5) == rates(expected, theirs, STEPS + 5)


def test_plateau_of_transformers():
    options = {"factor": 0.5, "patience": 1, "threshold": 0.01, "cooldown": 1, "min_lr": 1e-4, "mode": "min"}
    theirs, ours = optimizer(), optimizer()
    expected = get_scheduler("reduce_lr_on_plateau", theirs, scheduler_specific_kwargs=dict(options))
    args = TrainingArguments(
        learning_rate=RATE,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs=options,
        eval_strategy="steps",
    )
    schedule = build_schedule(args, ours, -1)
    schedule.on_train_begin(args, None, None)
    for loss in (3.0, 2.0, 2.0, 2.0, 2.0, 1.999, 2.5, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        expected.step(loss)
        schedule.step()  # the loop's own call after each optimizer step
        schedule.on_evaluate(args, None, None, metrics={"eval_loss": loss})
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert ours.param_groups[0]["lr"] < RATE


def test_all_schedules_are_covered():
    from trainer_core.arguments.choices import SCHEDULES

    assert {name for name, _ in CASES} | {"reduce_lr_on_plateau"} == set(SCHEDULES)
