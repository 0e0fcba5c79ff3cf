from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from trainer_core import EVENTS, ConfigurationError, TrainData, Trainer, TrainerControl


class Recorder:
    """Notes every event with the keywords it came with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, set[str]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in EVENTS:
            raise AttributeError(name)
        return lambda args, state, control, **kw: self.seen.append((name, set(kw)))

    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def test_events_come_in_order_with_their_keywords(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    recorder = Recorder()
    trainer = make_trainer(
        loader=ragged_loader(rows=8, batch_size=2),
        eval_loader=ragged_loader(rows=4),
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        callbacks=[recorder],
    )
    trainer.train()
    micro = ["on_forward_backward_begin", "on_forward_backward_end"]
    step = [
        "on_step_begin",
        *micro,
        *micro,
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_train_metrics",
        "on_step_end",
        "on_log_step",
        "on_log",
    ]
    assert recorder.names() == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        *step,
        *step,
        "on_prediction_step",
        "on_evaluate",
        "on_log",
        "on_save",
        "on_epoch_end",
        "on_log",
        "on_train_end",
    ]
    assert {*recorder.names(), "on_exception", "on_memory_save"} == set(EVENTS)
    always = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    assert all(always | {"trainer"} <= keywords for _, keywords in recorder.seen)
    extras = {name: keywords - always - {"trainer"} for name, keywords in recorder.seen}
    assert extras["on_train_metrics"] == {"loss", "grad_norm", "tokens"}
    assert extras["on_log_step"] == extras["on_log"] == {"logs"}
    assert extras["on_evaluate"] == {"metrics"}
    assert extras["on_save"] == {"checkpoint_path"}


class Ask:
    """Raises a flag at some step, on the control given or on a new one."""

    def __init__(self, flag: str, step: int, *, returned: bool = False) -> None:
        self.flag, self.step, self.returned = flag, step, returned

    def on_step_end(self, args: object, state: object, control: TrainerControl, **kw: object) -> object:
        if state.global_step != self.step:  # type: ignore[attr-defined]
            return None
        target = TrainerControl() if self.returned else control
        setattr(target, self.flag, True)
        return target


@pytest.mark.parametrize("returned", [False, True])
def test_a_stop_is_attributed_and_saved(make_trainer: Callable[..., Trainer], returned: bool) -> None:
    trainer = make_trainer(
        callbacks=[Ask("should_training_stop", 2, returned=returned)], save_strategy="steps", save_steps=100
    )
    assert trainer.train().global_step == 2
    assert trainer.stop_cause == ("Ask", "on_step_end", False)
    assert trainer.saved_step == 2


def test_an_abort_saves_nothing_and_wins(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(
        callbacks=[Ask("should_training_stop", 2), Ask("should_abort_without_save", 2)], save_strategy="steps"
    )
    trainer.train()
    assert trainer.stop_cause is not None
    assert trainer.stop_cause.aborted
    assert trainer.saved_step == -1


def test_an_epoch_stop_ends_the_epoch_only(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(callbacks=[Ask("should_epoch_stop", 2)], num_train_epochs=2)
    assert trainer.train().global_step == 2 + 6
    assert trainer.state.raw_epoch == 2


def test_a_stop_before_the_first_step_trains_nothing(make_trainer: Callable[..., Trainer]) -> None:
    class StopAtOnce:
        def on_train_begin(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
            control.should_training_stop = True

    trainer = make_trainer(callbacks=[StopAtOnce()])
    assert trainer.train().global_step == 0


def test_flags_ask_for_log_evaluation_and_save(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object]
) -> None:
    trainer = make_trainer(
        callbacks=[Ask("should_log", 2), Ask("should_evaluate", 3), Ask("should_save", 4)],
        eval_loader=ragged_loader(rows=4),
        logging_steps=100,
        max_steps=5,
    )
    trainer.train()
    logged = [(entry["global_step"], "eval_loss" in entry) for entry in trainer.state.log_history]
    assert logged[:2] == [(2, False), (3, True)]
    assert trainer.saved_step == 4


def test_callbacks_are_added_and_taken_out_by_class_and_identity(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer()
    recorder = Recorder()
    trainer.add_callback(Recorder)
    trainer.add_callback(recorder)
    assert trainer.pop_callback(recorder) is recorder
    assert isinstance(trainer.pop_callback(Recorder), Recorder)
    assert trainer.pop_callback(Recorder) is None


@pytest.mark.parametrize(("event", "served"), [("on_epoch_end", [6, 12]), ("on_evaluate", [3, 6, 9, 12])])
def test_what_a_callback_asks_for_is_served_before_the_next_step(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    tmp_path: Path,
    event: str,
    served: list[int],
) -> None:
    class Asks:
        def ask(self, args: object, state: object, control: TrainerControl, **kw: object) -> None:
            control.should_save = control.should_log = True

    setattr(Asks, event, Asks.ask)
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4),
        num_train_epochs=2,
        save_strategy="steps",
        save_total_limit=None,
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=3,
        callbacks=[Asks()],
    )
    trainer.train()
    found = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert found == served
    assert [entry["global_step"] for entry in trainer.state.log_history if "loss" in entry] == served


def test_an_exception_that_ends_training_is_told_of_and_raised(make_trainer: Callable[..., Trainer]) -> None:
    class Fails:
        def on_step_end(self, args: object, state: object, control: object, **kw: object) -> None:
            raise RuntimeError("no more")

    class FailsToClose:
        def on_exception(self, args: object, state: object, control: object, **kw: object) -> None:
            raise ValueError("cannot be closed")

    recorder = Recorder()
    trainer = make_trainer(max_steps=3, callbacks=[Fails(), recorder])
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert recorder.names()[-1] == "on_exception"
    fails_again = make_trainer(max_steps=3, callbacks=[Fails(), FailsToClose()])
    with pytest.raises(RuntimeError, match="no more"):
        fails_again.train()
    assert "on_train_end" not in recorder.names()
    assert "exception" in recorder.seen[-1][1]


class Thaw:
    """Freezes the mixing layer before a step, and thaws it from there on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(
        self, args: object, state: object, control: object, *, model: nn.Module, **kw: object
    ) -> None:
        model.mix.requires_grad_(state.global_step >= self.step)  # type: ignore[attr-defined,operator]


def test_parameters_that_were_never_in_the_optimizer_cannot_be_thawed(
    make_trainer: Callable[..., Trainer], tiny_model: type[nn.Module], ragged_loader: Callable[[], TrainData]
) -> None:
    model = tiny_model()
    model.mix.requires_grad_(False)  # type: ignore[operator]
    args = make_trainer().args
    trainer = Trainer(args, model=model, train_dataset=ragged_loader(), callbacks=[Thaw(2)])
    with pytest.raises(
        ConfigurationError, match=r"model='mix\.weight' was frozen when the optimizer was made"
    ):
        trainer.train()
    assert trainer.state.global_step == 2

    model = tiny_model()  # whose layer is trainable from the start
    before = model.mix.weight.clone()  # type: ignore[operator]
    Trainer(args, model=model, train_dataset=ragged_loader(), callbacks=[Thaw(2)]).train()
    assert not before.equal(model.mix.weight)  # type: ignore[arg-type]
