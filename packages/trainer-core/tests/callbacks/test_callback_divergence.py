from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import DivergenceDetector

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]
Judge = Callable[[DivergenceDetector, Iterable[float]], tuple[int, TrainerControl] | None]


@pytest.fixture
def judge(arguments: Arguments, state: State) -> Judge:
    """Number of the record that ended the run, counted from 1, and what was asked for."""

    def run(detector: DivergenceDetector, losses: Iterable[float]) -> tuple[int, TrainerControl] | None:
        for number, loss in enumerate(losses, start=1):
            control = TrainerControl()
            detector.on_log_step(arguments(), state(number), control, logs={"loss": loss})
            if control.ends_run:
                return number, control
        return None

    return run


def falling(records: int, seed: int = 0) -> list[float]:
    """A loss that falls from 5 with noise."""
    noise = random.Random(seed)
    return [5 * 0.99**record + noise.gauss(0, 0.05) for record in range(records)]


def test_a_noisy_falling_loss_is_no_divergence(judge: Judge) -> None:
    for seed in range(5):
        assert judge(DivergenceDetector(patience=1), falling(300, seed)) is None


def test_a_flat_loss_with_tiny_noise_is_no_divergence(judge: Judge) -> None:
    assert judge(DivergenceDetector(patience=1), [2.0, *[2.0] * 30, 2.05]) is None


def test_spikes_in_a_row_end_the_run(judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ended = judge(DivergenceDetector(patience=3), [*falling(40), 50.0, 60.0, 70.0])
    assert ended is not None
    assert ended[0] == 43
    assert ended[1].should_abort_without_save
    assert "loss is 50 at step 41, above" in caplog.text
    assert "loss is 70 at step 43, above" in caplog.text
    assert "spike 3 in a row; action: abort" in caplog.text


def test_single_spikes_do_not(judge: Judge) -> None:
    losses = falling(200)
    losses[50] = losses[90] = losses[91] = 50.0
    assert judge(DivergenceDetector(patience=3), losses) is None


def test_the_first_records_are_never_spikes(judge: Judge) -> None:
    assert judge(DivergenceDetector(patience=1), [1.0, 9.0, 1.0, 9.0, 90.0]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_run_at_once(judge: Judge, value: float) -> None:
    ended = judge(DivergenceDetector(patience=5, action="stop"), [2.0, value])
    assert ended is not None
    assert ended[0] == 2
    assert ended[1].should_training_stop
    assert not ended[1].should_abort_without_save


def test_it_goes_on_from_a_checkpoint(judge: Judge) -> None:
    whole, first, second = (DivergenceDetector(window=20, patience=3) for _ in range(3))
    losses = [*falling(40), 50.0, 60.0, 70.0]
    assert judge(first, losses[:42]) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    ended = judge(second, losses[42:])
    assert ended is not None
    assert ended[0] == 1
    assert judge(whole, losses) is not None
    assert second.state_dict() == whole.state_dict()


def test_a_run_that_blows_up_is_left_without_a_checkpoint(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make_trainer(
        learning_rate=900.0,
        warmup_steps=0,
        lr_scheduler_type="constant",
        max_steps=60,
        num_train_epochs=-1,
        save_strategy="steps",
        callbacks=[DivergenceDetector(threshold=0.1, patience=1)],
    )
    output = trainer.train()
    assert 8 < output.global_step < 60
    assert trainer.stop_cause is not None
    assert trainer.stop_cause.name == "divergence"
    assert trainer.stop_cause.aborted
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_an_unknown_metric_is_an_error_with_those_there_are(arguments: Arguments, state: State) -> None:
    with pytest.raises(ConfigurationError, match=r"metric='los'.*Choose one of grad_norm, loss"):
        DivergenceDetector("los").on_log_step(
            arguments(), state(1), TrainerControl(), logs={"loss": 1.0, "grad_norm": 2.0, "mfu": None}
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 7}, "window=7 must be 8 or more"),
        ({"threshold": 0.0}, "threshold=0.0 must be above 0"),
        ({"patience": 0}, "patience=0 must be 1 or more"),
        ({"action": "exit"}, "action='exit' must be 'stop' or 'abort'"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DivergenceDetector(**settings)  # type: ignore[arg-type]
