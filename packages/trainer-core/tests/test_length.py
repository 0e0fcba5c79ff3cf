"""How long a run is, and which learning rate each step gets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch

from dataloader_dispatch import DocumentStream, StreamLoader
from trainer_core import ConfigurationError, DataError, Trainer


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 6),
        ({"max_steps": 14}, 14),
        ({"num_train_epochs": 1}, 6),
        ({"num_train_epochs": 2.5}, 15),
        ({"num_train_epochs": 2, "max_steps": 4}, 4),
        ({"num_train_epochs": 1, "max_steps": 100}, 6),
        ({"num_train_epochs": -1, "max_steps": 14}, 14),
        ({"max_steps": 0}, 0),
    ],
)
def test_the_smaller_limit_wins(
    make_trainer: Callable[..., Trainer], settings: dict[str, object], steps: int
) -> None:
    trainer = make_trainer(**settings)
    assert trainer.train().global_step == steps
    assert trainer.state.max_steps == steps
    # Also what schedule, progress and summary show.
    assert trainer.state.epoch == trainer.state.num_train_epochs == steps / 6


def test_of_two_limits_the_log_says_which_one_holds(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_trainer(num_train_epochs=2, max_steps=4).train()
    said = "max_steps=4 and num_train_epochs=2 (12 steps) are both set: the run ends at the first of them"
    assert said in caplog.text
    for settings in ({"max_steps": 4}, {"num_train_epochs": 1}, {"max_steps": 4, "num_train_epochs": -1}):
        caplog.clear()
        make_trainer(**settings).train()
        assert "are both set" not in caplog.text


def test_a_warmup_that_the_run_does_not_get_through_is_said(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(max_steps=6, warmup_steps=5).train()
    assert "warmup_steps" not in caplog.text
    short = make_trainer(max_steps=6, warmup_steps=6)
    short.train()
    assert "warmup_steps=6 is not shorter than the run of 6 steps" in caplog.text
    assert max(rates_of(short)) < 1e-2  # type: ignore[type-var]


def rates_of(trainer: Trainer) -> list[object]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("linear", lambda share: 1 - share),
        ("cosine", lambda share: 0.5 * (1 + math.cos(math.pi * share))),
        ("cosine_with_min_lr", lambda share: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))),
        ("constant_with_warmup", lambda share: 1.0),
    ],
)
def test_rates_follow_the_schedule_per_optimizer_step(
    make_trainer: Callable[..., Trainer], name: str, after: Callable[[float], float], accumulation: int
) -> None:
    trainer = make_trainer(
        lr_scheduler_type=name,
        num_train_epochs=-1,
        max_steps=10,
        warmup_steps=4,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    expected = [1e-2 * (step / 4 if step < 4 else after((step - 4) / 6)) for step in range(10)]
    assert rates_of(trainer) == pytest.approx(expected)


class Unsized:
    """Batches of unknown number, in epochs of five."""

    batch_size = 2

    def __iter__(self) -> object:
        for _ in range(5):
            ids = torch.arange(8).view(2, 4)
            yield {"input_ids": ids, "labels": ids}


def test_data_of_unknown_length_ends_by_epochs_or_steps(make_trainer: Callable[..., Trainer]) -> None:
    by_epochs = make_trainer(
        loader=Unsized(), num_train_epochs=2, lr_scheduler_type="constant", warmup_steps=0
    )
    assert by_epochs.train().global_step == 10
    assert by_epochs.state.epoch == 2.0
    assert make_trainer(loader=Unsized(), num_train_epochs=-1, max_steps=7).train().global_step == 7


def test_loaders_without_length_tell_their_progress(make_trainer: Callable[..., Trainer]) -> None:
    texts = [f"text number {number} of ten" for number in range(10)]
    rows = DocumentStream(
        texts, sequence_length=8, encode=lambda text: [ord(c) % 23 for c in text], eos_token_id=0
    )
    trainer = make_trainer(
        loader=StreamLoader(rows, 2), num_train_epochs=2, lr_scheduler_type="constant", warmup_steps=0
    )
    trainer.train()
    epochs = [float(entry["epoch"]) for entry in trainer.state.log_history if "loss" in entry]  # type: ignore[arg-type]
    assert epochs == sorted(epochs)
    assert 0 <= epochs[0] < epochs[1] < 0.5
    assert trainer.state.epoch == 2.0


def test_the_length_of_an_epoch_can_be_said_for_data_that_cannot_tell(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(loader=Unsized(), num_train_epochs=1.6, epoch_train_steps=5, warmup_steps=0)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.epoch) == (8, 1.6)
    # The schedule aims at that end.
    assert rates_of(trainer)[-1] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert "epoch_train_steps" not in caplog.text
    make_trainer(loader=Unsized(), num_train_epochs=2, epoch_train_steps=7).train()
    assert (
        "ended after 5 optimizer steps, and epoch_train_steps promised 7; the run ends after" in caplog.text
    )
    longer = make_trainer(loader=Unsized(), num_train_epochs=2, epoch_train_steps=4)
    longer.train()
    assert "continue after the 4 optimizer steps of an epoch that epoch_train_steps promised" in caplog.text
    epochs = [entry["epoch"] for entry in longer.state.log_history if "loss" in entry]
    assert epochs == [0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.5, 1.75]
    with pytest.raises(
        ConfigurationError, match=r"epoch_train_steps=5 .* of this data has 6 optimizer steps"
    ):
        make_trainer(epoch_train_steps=5).train()
    assert make_trainer(epoch_train_steps=6).train().global_step == 6


class BrokenLength(Unsized):
    """Claims a length and fails to tell it."""

    def __len__(self) -> int:
        raise TypeError("the index file holds text")


def test_a_length_that_fails_is_said_with_its_reason(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_trainer(
        loader=BrokenLength(), num_train_epochs=1, lr_scheduler_type="constant", warmup_steps=0
    ).train()
    assert "BrokenLength) is unknown: the index file holds text" in caplog.text
    caplog.clear()
    make_trainer(loader=Unsized(), num_train_epochs=1, lr_scheduler_type="constant", warmup_steps=0).train()
    assert "is unknown" not in caplog.text


def test_what_needs_the_length_says_so(make_trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigurationError, match=r"num_train_epochs=1\.5.*epoch_train_steps"):
        make_trainer(loader=Unsized(), num_train_epochs=1.5).train()
    with pytest.raises(ConfigurationError, match=r"lr_scheduler_type='cosine'.*max_steps"):
        make_trainer(loader=Unsized(), num_train_epochs=1).train()


def test_empty_data_is_an_error_and_not_an_endless_loop(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    with pytest.raises(DataError, match=r"gave no batch|has the length 0"):
        make_trainer(loader=ragged_loader(rows=0), num_train_epochs=-1, max_steps=3).train()
