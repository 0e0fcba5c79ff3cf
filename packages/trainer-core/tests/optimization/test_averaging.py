"""A moving average of the weights: what it is, who sees it, and what a checkpoint has of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkpoint_core import load_model_weights
from trainer_core import ConfigurationError, Trainer

DECAY = 0.8
STEPS = {"max_steps": 8, "num_train_epochs": -1, "lr_scheduler_type": "constant", "warmup_steps": 0}


class Record:
    """Copies of what training has after each step, and of what the model holds at other events."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []
        self.seen: dict[str, list[Tensor]] = {}

    def on_step_end(self, args: object, state: object, control: object, *, model: nn.Module, **_: object):
        self.steps.append(copies(model))

    def on_train_end(self, args: object, state: object, control: object, *, model: nn.Module, **_: object):
        self.seen["end"] = copies(model)

    def on_evaluate(self, args: object, state: object, control: object, *, trainer: Trainer, **_: object):
        with trainer.generating():
            self.seen["samples"] = copies(trainer.model)


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def moving_average(first: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    average = [value.clone() for value in first]
    for values in steps:
        for one, value in zip(average, values, strict=True):
            one.lerp_(value, 1 - DECAY)
    return average


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def losses(trainer: Trainer) -> list[object]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def recorded(make_trainer: Callable[..., Trainer]) -> Callable[..., tuple[Trainer, Record, list[Tensor]]]:
    """Trains; the trainer, what it had at each step, and its first weights."""

    def run(**settings: object) -> tuple[Trainer, Record, list[Tensor]]:
        record = Record()
        trainer = make_trainer(callbacks=[record], **{**STEPS, "ema_decay": DECAY, **settings})
        first = copies(trainer.model)
        trainer.train()
        return trainer, record, first

    return run


def stored(path: Path, model: nn.Module) -> list[Tensor]:
    load_model_weights(model, path)
    return copies(model)


def test_the_average_is_seen_by_whoever_uses_the_model(
    recorded, make_trainer, ragged_loader, tiny_model, tmp_path
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer, record, first = recorded(eval_loader=ragged_loader(seed=5), **evaluated)
    average = moving_average(first, record.steps)
    assert same(record.seen["end"], average)
    assert same(record.seen["samples"], average)
    assert same(copies(trainer.model), average)
    assert same(stored(tmp_path / "run" / "checkpoint-8", tiny_model()), average)
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == 2
    assert trainer.evaluate()["eval_loss"] == logged[-1]
    trainer.save_model(str(tmp_path / "average"))
    trainer.save_model(str(tmp_path / "training"), averaged=False)
    assert same(stored(tmp_path / "average", tiny_model()), average)
    assert same(stored(tmp_path / "training", tiny_model()), record.steps[-1])
    assert same(copies(trainer.model), average), "as before"
    plain = make_trainer(output_dir=str(tmp_path / "plain"), **STEPS)
    plain.train()
    assert losses(plain) == losses(trainer), "the curve is that of a run without an average"
    assert same(copies(plain.model), record.steps[-1])


def test_training_continues_from_its_own_weights(recorded, tmp_path) -> None:
    whole, _, _ = recorded(output_dir=str(tmp_path / "whole"))
    saving = {"output_dir": str(tmp_path / "part"), "save_strategy": "steps"}
    recorded(**saving, max_steps=5)
    resumed, _, _ = recorded(**saving)
    assert resumed.state.session_start_step == 5
    assert losses(resumed) == losses(whole)
    assert same(copies(resumed.model), copies(whole.model))


class LoadAt:
    """Goes back to a checkpoint in the middle of training, once."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: object, state: object, control: object, *, trainer: Trainer, **_: object):
        if state.global_step == self.step:  # type: ignore[attr-defined]
            self.step = None
            assert trainer.load_checkpoint()


def test_a_callback_that_goes_back_takes_up_both(make_trainer, recorded, tmp_path) -> None:
    whole, _, _ = recorded(output_dir=str(tmp_path / "whole"))
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(callbacks=[LoadAt(5)], **STEPS, **saving, ema_decay=DECAY)
    trainer.train()
    assert losses(trainer)[-5:] == losses(whole)[3:]
    assert same(copies(trainer.model), copies(whole.model))


def test_a_checkpoint_without_an_average_begins_one_and_says_so(recorded, caplog, tmp_path) -> None:
    saving = {"save_strategy": "steps", "output_dir": str(tmp_path / "run")}
    recorded(**saving, max_steps=5, ema_decay=None)
    with caplog.at_level(logging.WARNING):
        resumed, record, _ = recorded(**saving)
    assert any("has no average of weights: it begins with those of this step" in m for m in caplog.messages)
    whole, every, _ = recorded(output_dir=str(tmp_path / "whole"))
    assert losses(resumed) == losses(whole)
    assert same(copies(resumed.model), moving_average(every.steps[4], record.steps))


def test_an_average_is_not_taken_for_weights(recorded, tmp_path) -> None:
    saving = {"save_strategy": "steps", "output_dir": str(tmp_path / "run")}
    recorded(**saving, max_steps=5)
    with pytest.raises(ConfigurationError, match=r"ema_decay=None was 0.8 when the checkpoint was saved"):
        recorded(**saving, ema_decay=None)


def test_the_best_average_is_put_back(recorded, ragged_loader) -> None:
    every = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer, _, _ = recorded(
        eval_loader=ragged_loader(seed=5), load_best_model_at_end=True, learning_rate=0.5, **every
    )
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(logged) < logged[-1], "the last is the best: this test needs another learning rate"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(logged), rel=1e-6)


def test_sixteen_bits_are_refused(make_trainer) -> None:
    with pytest.raises(
        ConfigurationError, match=r"ema_decay=0.9 cannot average embed.weight, whose type torch.bfloat16"
    ):
        make_trainer(**STEPS, ema_decay=0.9, default_dtype="bfloat16").train()


def test_frozen_parameters_are_left_alone(make_trainer, tiny_model) -> None:
    trainer = make_trainer(**STEPS, ema_decay=DECAY)
    trainer.model.embed.weight.requires_grad_(False)
    before = trainer.model.embed.weight.detach().clone()
    trainer.train()
    assert torch.equal(trainer.model.embed.weight, before)
