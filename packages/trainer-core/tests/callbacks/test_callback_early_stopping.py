from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import EarlyStopping

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]


def stops_at(
    callback: EarlyStopping, values: list[float], args: TrainingArguments, state: TrainerState
) -> int | None:
    """Number of the evaluation that asked for the stop, counted from 1."""
    callback.on_train_begin(args, state, TrainerControl())
    for number, value in enumerate(values, start=1):
        control = TrainerControl()
        callback.on_evaluate(args, state, control, metrics={callback.metric: value})
        if control.should_training_stop:
            assert not control.should_abort_without_save
            return number
    return None


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.4], 4),
        ({"patience": 2}, [3.0, 2.0, 2.5, 1.9, 2.0], None),
        ({"patience": 1}, [3.0, 3.0], 2),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.6], 3),
        # The best value is the best seen, so small gains do not add up to an improvement.
        ({"patience": 3, "min_delta": 0.5}, [3.0, 2.7, 2.4, 2.1], 4),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.8, 2.2, 2.1], None),
        ({"patience": 2}, [3.0, math.nan, math.inf], 3),
        ({"patience": 1}, [math.nan, 3.0, 2.0], 1),
        ({"patience": 1, "metric": "accuracy", "greater_is_better": True}, [0.5, 0.6, 0.6], 3),
    ],
)
def test_when_it_stops(
    settings: dict[str, object],
    values: list[float],
    expected: int | None,
    arguments: Arguments,
    state: State,
) -> None:
    assert stops_at(EarlyStopping(**settings), values, arguments(), state(5)) == expected  # type: ignore[arg-type]


def test_the_count_goes_on_from_a_checkpoint(arguments: Arguments, state: State) -> None:
    first = EarlyStopping(patience=3)
    assert stops_at(first, [2.0, 2.1, 2.2], arguments(), state(3)) is None
    second = EarlyStopping(patience=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.best, second.evaluations_without_improvement) == (2.0, 2)
    assert stops_at(second, [2.05], arguments(), state(4)) == 1


def test_an_unknown_metric_is_an_error_with_those_there_are(arguments: Arguments, state: State) -> None:
    callback = EarlyStopping("eval_los_loss")
    callback.on_train_begin(arguments(), state(), TrainerControl())
    with pytest.raises(ConfigurationError, match="Choose one of eval_loss, eval_tokens"):
        callback.on_evaluate(
            arguments(), state(1), TrainerControl(), metrics={"eval_loss": 1.0, "eval_tokens": 5}
        )


def test_the_prefix_may_be_left_out(arguments: Arguments, state: State) -> None:
    callback = EarlyStopping("loss", patience=1)
    callback.on_train_begin(arguments(), state(), TrainerControl())
    callback.on_evaluate(arguments(), state(1), TrainerControl(), metrics={"eval_loss": 1.5})
    assert callback.best == 1.5


def test_it_ends_a_run_and_only_evaluations_of_the_run_count(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    callback = EarlyStopping(patience=2)
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4),
        learning_rate=0.0,
        max_steps=20,
        num_train_epochs=-1,
        eval_strategy="steps",
        eval_steps=2,
        callbacks=[callback],
    )
    trainer.evaluate()
    assert callback.best is None
    assert trainer.train().global_step == 6
    assert trainer.stop_cause is not None
    assert (trainer.stop_cause.name, trainer.stop_cause.event) == ("early_stopping", "on_evaluate")
    trainer.evaluate()
    assert callback.evaluations_without_improvement == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience=0 must be 1 or more"),
        ({"min_delta": -1.0}, "min_delta=-1.0 must be 0 or more"),
        ({"min_delta": math.nan}, "min_delta=nan"),
        ({"metric": "eval_accuracy"}, "greater_is_better=None has no default"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EarlyStopping(**settings)  # type: ignore[arg-type]
