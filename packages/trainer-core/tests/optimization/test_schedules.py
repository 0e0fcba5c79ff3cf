"""Schedules: values, options, resume, and those that are callbacks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from trainer_core import ConfigurationError
from trainer_core.arguments.choices import SCHEDULES, WITHOUT_TOTAL, check_schedule, needs_total
from trainer_core.optimization import PlateauSchedule, build_schedule, is_callback

WARMUP, TOTAL, RATE = 4, 20, 0.1
STEPS = (0, 1, 4, 9, 15, 19, 20, 23)
FLOOR = {"min_lr_rate": 0.1}
SQUARE_ROOT = {"num_decay_steps": 6, "min_lr_ratio": 0.1, "decay_type": "1-sqrt", "warmup_type": "cosine"}
# Rates at STEPS, computed with transformers 5.23.
GOLDENS = [
    ("linear", {}, [0.0, 0.025, 0.1, 0.06875, 0.03125, 0.00625, 0.0, 0.0]),
    ("cosine", {}, [0.0, 0.025, 0.1, 0.077778512, 0.022221488, 0.000960736, 0.0, 0.008426519]),
    (
        "cosine_with_restarts",
        {"num_cycles": 2},
        [0.0, 0.025, 0.1, 0.030865828, 0.069134172, 0.003806023, 0.0, 0.0],
    ),
    (
        "polynomial",
        {"lr_end": 0.01, "power": 2.0},
        [0.0, 0.025, 0.1, 0.052539063, 0.018789063, 0.010351562, 0.01, 0.01],
    ),
    ("constant", {}, [0.1] * 8),
    ("constant_with_warmup", {}, [0.0, 0.025, *[0.1] * 6]),
    ("inverse_sqrt", {}, [0.0, 0.025, 0.1, 0.066666667, 0.051639778, 0.045883147, 0.04472136, 0.041702883]),
    (
        "cosine_with_min_lr",
        {"min_lr": 0.01},
        [0.0, 0.025, 0.1, 0.08000066, 0.02999934, 0.010864662, 0.01, 0.017583867],
    ),
    (
        "cosine_warmup_with_min_lr",
        FLOOR,
        [0.025, 0.05, 0.099135338, 0.072220754, 0.023180195, 0.01, 0.010864662, 0.023180195],
    ),
    (
        "cosine_warmup_with_min_lr",
        {**FLOOR, "warmup_lr_rate": 0.2},
        [0.02, 0.046666667, 0.099135338, 0.072220754, 0.023180195, 0.01, 0.010864662, 0.023180195],
    ),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 6},
        [0.0, 0.025, 0.1, 0.1, 0.09330127, 0.00669873, 0.0, 0.0],
    ),
    (
        "warmup_stable_decay",
        SQUARE_ROOT,
        [0.01, 0.023180195, 0.1, 0.1, 0.063257654, 0.017841616, 0.01, 0.01],
    ),
]


def sgd(*rates: float) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=rates[0])


@pytest.fixture
def schedule(arguments):
    """Builds a schedule by name over an optimizer."""

    def make(name, options=None, *, optimizer, total=TOTAL):
        warmup = 0 if name in ("constant", "reduce_lr_on_plateau") else WARMUP
        args = arguments(
            learning_rate=RATE,
            lr_scheduler_type=name,
            lr_scheduler_kwargs=options or {},
            warmup_steps=warmup,
            eval_strategy="steps",
        )
        return build_schedule(args, optimizer, total)

    return make


def run(scheduler, optimizer, steps):
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("name", "options", "expected"), GOLDENS)
def test_values(schedule, name, options, expected):
    optimizer = sgd(RATE, RATE / 10)
    seen = run(schedule(name, options, optimizer=optimizer), optimizer, 24)
    assert [seen[step][0] for step in STEPS] == pytest.approx(expected, abs=1e-9)
    assert [seen[step][1] * 10 for step in STEPS] == pytest.approx(expected, abs=1e-8)


def test_floor_is_a_tenth_when_not_given(schedule):
    optimizer = sgd(RATE)
    assert run(schedule("cosine_with_min_lr", optimizer=optimizer), optimizer, 21)[20] == [
        pytest.approx(0.01)
    ]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "reduce_lr_on_plateau"])
def test_resume_goes_on_exactly(schedule, name):
    options = {"num_decay_steps": 6} if name == "warmup_stable_decay" else {}
    optimizer = sgd(RATE)
    whole = schedule(name, options, optimizer=optimizer)
    before = run(whole, optimizer, 9)
    saved = whole.state_dict(), optimizer.state_dict()
    rest = run(whole, optimizer, 11)
    other = sgd(RATE)
    again = schedule(name, options, optimizer=other)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert again.get_last_lr() == [rest[0][0]]
    assert run(again, other, 11) == rest
    assert before != rest or name.startswith("constant")


def test_takes_over_a_schedule_saved_by_torch(schedule):
    optimizer = sgd(RATE)
    old = LambdaLR(optimizer, lambda step: 1.0)
    run(old, optimizer, 5)
    ours = schedule("linear", optimizer=(other := sgd(RATE)))
    ours.load_state_dict(old.state_dict())
    other.step()
    ours.step()
    assert other.param_groups[0]["lr"] == RATE * 14 / 16


@pytest.mark.parametrize("name", SCHEDULES)
def test_unknown_length(schedule, name):
    options = {"num_decay_steps": 6} if name == "warmup_stable_decay" else {}
    assert needs_total(name, options) is (name not in WITHOUT_TOTAL)
    if name in WITHOUT_TOTAL:
        schedule(name, options, optimizer=sgd(RATE), total=-1)
        return
    with pytest.raises(ConfigurationError, match=r"lr_scheduler_type=.*where the run ends.*Set max_steps"):
        schedule(name, options, optimizer=sgd(RATE), total=-1)


def test_stable_steps_stand_in_for_the_length(schedule):
    optimizer = sgd(RATE)
    options = {"num_decay_steps": 4, "num_stable_steps": 6}
    seen = run(schedule("warmup_stable_decay", options, optimizer=optimizer, total=-1), optimizer, 15)
    assert [rate for (rate,) in seen][4:10] == [RATE] * 6
    assert seen[14] == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "is not a known schedule. Did you mean 'cosine'"),
        ("linear_with_warmup", {}, "Did you mean 'linear'"),
        ("cosine_with_restart", {}, "Did you mean 'cosine_with_restarts'"),
        ("linear", {"num_cycles": 1}, r"lr_scheduler_kwargs\.num_cycles=1 is not an option of 'linear'"),
        ("cosine", {"num_cycle": 1}, "Did you mean 'num_cycles'"),
        ("cosine", {"num_cycles": 0}, "both excluded"),
        ("cosine", {"num_cycles": True}, "must be a number"),
        ("cosine_with_restarts", {"num_cycles": 0.5}, "whole number of at least 1"),
        ("polynomial", {"power": -1.0}, "must be a number from 0"),
        ("inverse_sqrt", {"timescale": 0}, "whole number of at least 1"),
        ("cosine_with_min_lr", {"min_lr_rate": 1.5}, "from 0 to 1"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1, "min_lr": 0.1}, "Leave one of them out"),
        ("warmup_stable_decay", {}, "lacks num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "square"}, "must be one of 'linear'"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, "between 0 and 1, both excluded"),
        ("reduce_lr_on_plateau", {"mode": "least"}, "must be one of 'min', 'max'"),
        ("reduce_lr_on_plateau", {"metric": ""}, "name of a metric"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        check_schedule(name, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"lr_end": 0.2}, "lr_end=0.2 must be below the learning rate 0.1"),
        ("cosine_with_min_lr", {"min_lr": 0.2}, "min_lr=0.2 is above the learning rate 0.1"),
        ("warmup_stable_decay", {"num_decay_steps": 17}, r"warm-up \(4\).*do not fit into 20 steps"),
    ],
)
def test_options_that_do_not_fit_the_run(schedule, name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        schedule(name, options, optimizer=sgd(RATE))


def test_plateau_is_fed_by_evaluations(schedule):
    optimizer = sgd(RATE)
    plateau = schedule("reduce_lr_on_plateau", {"patience": 0, "factor": 0.5}, optimizer=optimizer)
    assert isinstance(plateau, PlateauSchedule)
    assert is_callback(plateau)
    plateau.on_evaluate(None, None, None, metrics={"eval_loss": 9.0})  # before training: does not count
    plateau.on_train_begin(None, None, None)
    for loss in (2.0, 1.0, 1.0, math.nan):
        run(plateau, optimizer, 3)
        plateau.on_evaluate(None, None, None, metrics={"eval_loss": loss, "eval_tokens": 3}, model=None)
    assert optimizer.param_groups[0]["lr"] == RATE / 4
    again = schedule(
        "reduce_lr_on_plateau", {"patience": 0, "factor": 0.5}, optimizer=(other := sgd(RATE / 4))
    )
    again.load_state_dict(plateau.state_dict())
    again.on_train_begin(None, None, None)
    again.on_evaluate(None, None, None, metrics={"eval_loss": 1.0})
    assert other.param_groups[0]["lr"] == RATE / 8


def test_plateau_names_the_metrics_there_are(schedule):
    plateau = schedule("reduce_lr_on_plateau", {"metric": "accuracy"}, optimizer=sgd(RATE))
    plateau.on_train_begin(None, None, None)
    plateau.on_evaluate(None, None, None, metrics={"eval_accuracy": 0.5})
    with pytest.raises(ConfigurationError, match=r"metric='accuracy'.*eval_loss, eval_tokens"):
        plateau.on_evaluate(None, None, None, metrics={"eval_tokens": 3, "eval_loss": 1.0})


def test_an_ordinary_schedule_is_no_callback(schedule):
    assert not is_callback(schedule("linear", optimizer=sgd(RATE)))
