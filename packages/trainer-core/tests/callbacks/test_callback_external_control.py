from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_core import ConfigurationError, Trainer, TrainerControl, TrainerState, TrainingArguments
from trainer_core.callbacks import ExternalControl

Arguments = Callable[..., TrainingArguments]
State = Callable[..., TrainerState]


class WritesAt:
    """Somebody who writes words into the control file when a step begins."""

    def __init__(self, path: Path, words: dict[int, str]) -> None:
        self.path = path
        self.words = words

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        step = state.global_step + 1  # type: ignore[attr-defined]
        if step in self.words:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.words[step])


def test_words_are_served_at_the_next_step(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    path = tmp_path / "run" / "control"
    writer = WritesAt(path, {2: "log\n", 3: "save evaluate", 5: "STOP\n"})
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4),
        max_steps=20,
        num_train_epochs=-1,
        logging_steps=100,
        save_strategy="steps",
        save_total_limit=None,
        callbacks=[writer, ExternalControl(every_seconds=0)],
    )
    assert trainer.train().global_step == 5
    assert trainer.stop_cause is not None
    assert (trainer.stop_cause.name, trainer.stop_cause.event) == ("external_control", "on_step_end")
    history = trainer.state.log_history
    assert [entry["global_step"] for entry in history if "loss" in entry] == [2]
    assert [entry["global_step"] for entry in history if "eval_loss" in entry] == [3]
    saved = sorted(entry.name for entry in (tmp_path / "run").glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-5"]
    status = json.loads((tmp_path / "run" / "control.status").read_text())
    assert (status["served"], status["step"], status["max_steps"]) == (["stop"], 5, 20)
    assert status["loss"] == next(entry["loss"] for entry in history if "loss" in entry)
    assert status["eta_seconds"] > 0
    assert not path.exists()
    assert not path.with_name("control.taken").exists()


def test_abort_leaves_without_a_checkpoint(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    path = tmp_path / "steer"
    trainer = make_trainer(
        max_steps=20,
        num_train_epochs=-1,
        save_strategy="steps",
        callbacks=[WritesAt(path, {3: "abort"}), ExternalControl(path, every_seconds=0)],
    )
    assert trainer.train().global_step == 3
    assert trainer.stop_cause is not None
    assert trainer.stop_cause.aborted
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_file_with_an_unknown_word_is_kept_and_not_served(
    arguments: Arguments, state: State, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "control"
    callback, control = ExternalControl(path), TrainerControl()
    callback.on_train_begin(arguments(), state(), control)
    path.write_text("stop sav")
    with caplog.at_level(logging.WARNING):
        callback.on_step_end(arguments(), state(1), control)
    assert control == TrainerControl()
    assert "unknown 'sav'; known are save, stop, log, evaluate, abort, profile" in caplog.text
    assert path.with_name("control.rejected").read_text() == "stop sav"
    assert not path.exists()


def test_an_empty_file_is_being_written(arguments: Arguments, state: State, tmp_path: Path) -> None:
    path = tmp_path / "control"
    callback, control = ExternalControl(path, every_seconds=0), TrainerControl()
    callback.on_train_begin(arguments(), state(), control)
    path.touch()
    callback.on_step_end(arguments(), state(1), control)
    assert path.exists()
    path.write_text("save")
    callback.on_step_end(arguments(), state(2), control)
    assert control == TrainerControl(should_save=True)


def test_it_looks_only_as_often_as_it_was_told(
    arguments: Arguments, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    real = os.stat

    def counting(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if path == tmp_path / "control":
            looks.append(path)
        return real(path, *args, **kwargs)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", counting)
    for settings, expected in (({"every_seconds": 0}, 12), ({"every_seconds": 60}, 1)):
        callback = ExternalControl(tmp_path / "control", **settings)  # type: ignore[arg-type]
        callback.on_train_begin(arguments(), state(), TrainerControl())
        looks.clear()
        for step in range(1, 13):
            callback.on_step_end(arguments(), state(step), TrainerControl())
        assert len(looks) == expected
    callback = ExternalControl(tmp_path / "control", every_steps=4, every_seconds=0)
    callback.on_train_begin(arguments(), state(), TrainerControl())
    looks.clear()
    for step in range(1, 13):
        callback.on_step_end(arguments(), state(step), TrainerControl())
        callback.on_step_end(arguments(), state(step, is_world_process_zero=False), TrainerControl())
    assert len(looks) == 3


def test_a_directory_is_refused(arguments: Arguments, state: State, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is a directory\. Give the path of a file in it"):
        ExternalControl(tmp_path).on_train_begin(arguments(), state(), TrainerControl())


def test_a_status_with_nothing_known_is_json(arguments: Arguments, state: State, tmp_path: Path) -> None:
    path = tmp_path / "control"
    callback = ExternalControl(path, every_seconds=0)
    callback.on_train_begin(arguments(), state(), TrainerControl())
    callback.on_log(arguments(), state(1), TrainerControl(), logs={"loss": float("nan")})
    path.write_text("log")
    callback.on_step_end(arguments(), state(1, max_steps=-1), TrainerControl())
    text = path.with_name("control.status").read_text()
    status = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (status["loss"], status["eta_seconds"], status["max_steps"]) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"every_steps": 0}, "every_steps=0"), ({"every_seconds": -1.0}, "every_seconds=-1.0")],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ExternalControl(**settings)  # type: ignore[arg-type]
