"""Gradients that are not finite, arguments that changed, callbacks that fail, devices that contradict."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_core import (
    ConfigurationError,
    DataError,
    NonFiniteGradientError,
    Trainer,
    TrainingArguments,
)


class Poison:
    """Makes the gradient of one step infinite or not a number."""

    def __init__(self, step: int, value: float) -> None:
        self.step = step
        self.value = value

    def on_forward_backward_end(
        self, args: object, state: object, control: object, *, model: torch.nn.Module, **_: object
    ) -> None:
        if state.global_step == self.step - 1:  # type: ignore[attr-defined]
            next(p for p in model.parameters() if p.grad is not None).grad[0] = self.value  # type: ignore[index]


def logged(trainer: Trainer, key: str) -> list[object]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_stop_leaves_the_weights_of_the_last_good_step_and_no_checkpoint_after_it(
    make_trainer: Callable[..., Trainer], tmp_path: Path, value: float
) -> None:
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 2, "logging_steps": 12}
    trainer = make_trainer(callbacks=[Poison(5, value)], **settings)
    trainer.train()
    assert trainer.stop_cause is not None
    assert trainer.stop_cause[:] == ("nonfinite_policy", "gradient of step 5", True)
    assert trainer.exit_code == 1
    (record,) = [entry for entry in trainer.state.log_history if "nonfinite_step" in entry]
    assert (record["nonfinite_step"], record["global_step"], record["skipped_steps"]) == (5, 6, 2)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    good = make_trainer(max_steps=12, logging_steps=4, save_strategy="no", output_dir=str(tmp_path / "good"))
    stop = StopAt(4)
    good.add_callback(stop)
    good.train()
    # The figures are those of the steps that were applied; step 6 was computed, and left out as step 5 was.
    for name in ("loss", "grad_norm", "grad_norm_max"):
        assert record[name] == good.state.log_history[0][name]
    for one, other in zip(
        trainer.unwrapped_model().parameters(), good.unwrapped_model().parameters(), strict=True
    ):
        assert torch.equal(one, other)


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        control.should_training_stop = state.global_step == self.step  # type: ignore[attr-defined]


def test_raise_names_the_step(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        callbacks=[Poison(3, math.nan)], nonfinite_policy="raise", logging_steps=5, max_steps=8
    )
    with pytest.raises(NonFiniteGradientError, match="step 3"):
        trainer.train()


def test_skip_leaves_out_the_step_and_says_so(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        callbacks=[Poison(3, math.inf)], nonfinite_policy="skip", logging_steps=4, max_steps=8
    )
    trainer.train()
    assert logged(trainer, "skipped_steps") == [1]
    assert all(math.isfinite(float(norm)) for norm in logged(trainer, "grad_norm"))  # type: ignore[arg-type]
    assert all(bool(p.isfinite().all()) for p in trainer.unwrapped_model().parameters())


def test_a_loss_that_is_not_a_number_stops_the_run(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(max_steps=6)
    with torch.no_grad():
        next(trainer.unwrapped_model().parameters())[:] = math.nan
    trainer.train()
    assert trainer.stop_cause is not None
    assert trainer.stop_cause.event == "gradient of step 1"


def test_an_error_in_a_callback_names_it_and_the_event(make_trainer: Callable[..., Trainer]) -> None:
    class Clumsy:
        name = "clumsy"

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        make_trainer(callbacks=[Clumsy()], max_steps=3).train()
    assert caught.value.__notes__ == ["raised by the callback clumsy in on_step_end, step 1"]


def run_until(make_trainer: Callable[..., Trainer], step: int, **settings: object) -> Trainer:
    trainer = make_trainer(callbacks=[StopAt(step)], save_strategy="steps", num_train_epochs=-1, **settings)
    trainer.train()
    return trainer


def test_a_changed_learning_rate_takes_effect_and_is_said(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"max_steps": 10, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    run_until(make_trainer, 4, learning_rate=1e-2, **shared)
    with caplog.at_level(logging.INFO, logger="trainer_core"):
        later = run_until(
            make_trainer,
            10,
            learning_rate=1e-3,
            allow_changes=("learning_rate", "weight_decay"),
            **(shared | {"weight_decay": 0.3}),
        )
    assert "learning_rate: 0.01 before, 0.001 now" in caplog.text
    rates = [float(rate) for rate in logged(later, "learning_rate")]  # type: ignore[arg-type]
    undisturbed = run_until(
        make_trainer, 10, learning_rate=1e-3, output_dir=later.args.output_dir + "2", **shared
    )
    expected = [float(rate) for rate in logged(undisturbed, "learning_rate")]  # type: ignore[arg-type]
    assert rates[4:] == pytest.approx(expected[4:])
    assert rates[:4] == pytest.approx([10 * rate for rate in expected[:4]])
    assert later.optimizer is not None
    assert {group["weight_decay"] for group in later.optimizer.param_groups} == {0.3, 0.0}


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.1), (0.1, 0.0)])
def test_weight_decay_can_be_switched_on_and_off_at_a_resume(
    make_trainer: Callable[..., Trainer], before: float, now: float
) -> None:
    run_until(make_trainer, 3, max_steps=6, weight_decay=before)
    later = run_until(make_trainer, 6, max_steps=6, weight_decay=now, allow_changes=("weight_decay",))
    assert later.state.global_step == 6
    assert later.optimizer is not None
    assert max(group["weight_decay"] for group in later.optimizer.param_groups) == now


def test_another_seed_is_refused(make_trainer: Callable[..., Trainer]) -> None:
    run_until(make_trainer, 3, max_steps=6)
    with pytest.raises(ConfigurationError, match=r"seed=8 was 7 when the checkpoint was saved"):
        run_until(make_trainer, 6, max_steps=6, seed=8)


def test_another_model_is_refused_with_the_names_that_differ(
    make_trainer: Callable[..., Trainer], tmp_path: Path, ragged_loader: Callable[..., object]
) -> None:
    run_until(make_trainer, 3, max_steps=6)
    other = Trainer(
        TrainingArguments(
            output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, seed=7, max_steps=6
        ),
        model_init=lambda: torch.nn.Embedding(23, 23),
        train_dataset=ragged_loader(),
        callbacks=[],
    )
    with pytest.raises(ValueError, match=r"mix\.weight|head\.weight|embed\.weight"):
        other.train()


def test_data_that_ends_early_ends_the_run_and_says_so(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Shorter(ragged_loader):  # type: ignore[misc, valid-type]
        """Says that it is longer than it is."""

        def __len__(self) -> int:
            return 2 * super().__len__()

    with caplog.at_level(logging.WARNING, logger="trainer_core"):
        output = make_trainer(loader=Shorter(), num_train_epochs=1).train()
    assert output.global_step == 6
    assert "ended after 6 optimizer steps, and its length promised 12" in caplog.text


def test_an_evaluation_of_nothing_is_explained(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    data = ragged_loader()
    data.labels[:] = -100  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"6 batches.*every label is -100.*per_device_eval_batch_size=16"):
        make_trainer(eval_loader=data).evaluate()


def test_a_device_that_contradicts_the_environment_is_refused(make_trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigurationError, match=r"device='nowhere'.*is not a device"):
        make_trainer(device="nowhere")
    assert make_trainer(use_cpu=True).ranks.device == torch.device("cpu")
    assert make_trainer(device="cpu").ranks.device == torch.device("cpu")


def test_options_beside_an_optimizer_of_ones_own_are_refused(make_trainer: Callable[..., Trainer]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"learning_rate=0\.01 has no effect together with an optimizer"
    ):
        make_trainer(with_trainer={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})})
    own = make_trainer(
        learning_rate=5e-5,
        max_steps=2,
        with_trainer={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    )
    own.train()
    assert isinstance(own.optimizer, torch.optim.SGD)


def test_settings_of_something_that_is_off_are_said(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer_core"):
        make_trainer(eval_steps=7, eval_delay=3, save_total_limit=5, gc_threshold=0.9)
    said = [record.getMessage().partition("=")[0] for record in caplog.records]
    assert said == ["eval_steps", "eval_delay", "save_total_limit", "gc_threshold"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainer_core"):
        make_trainer(logging_steps=50)
    assert not caplog.records


def test_a_stop_without_a_checkpoint_is_no_reason_to_start_again(
    make_trainer: Callable[..., Trainer],
) -> None:
    slow = {"max_steps": 100_000, "num_train_epochs": -1, "max_train_seconds": 0.2}
    unsaved = make_trainer(**slow)
    unsaved.train()
    assert unsaved.stop_cause is not None
    assert unsaved.stop_cause[:2] == ("max_train_seconds", "time limit")
    assert unsaved.exit_code == 1
    saved = make_trainer(**slow, save_strategy="steps", save_steps=100_000)
    saved.train()
    assert saved.exit_code == 75
