"""TensorBoardCallback, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer_core import ConfigurationError, Trainer
from trainer_core.callbacks import TensorBoardCallback


class KilledAt:
    """Keeps the tracker's state of the newest checkpoint, and ends the process's work at a step."""

    def __init__(self, tracker: TensorBoardCallback, step: int) -> None:
        self.tracker = tracker
        self.step = step
        self.saved = ""

    def on_save(self, args: object, state: object, control: object, **_: object) -> None:
        self.saved = json.dumps(self.tracker.state_dict())

    def on_log(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            raise KeyboardInterrupt


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def test_curves_can_be_read_back(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], tmp_path: Path
) -> None:
    tracker = TensorBoardCallback()
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4), num_train_epochs=1, eval_strategy="epoch", callbacks=[tracker]
    )
    trainer.train()
    events = read(tmp_path / "run" / "tensorboard" / str(tracker.run_id))
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx({entry["global_step"]: entry["loss"] for entry in history})
    assert [event.step for event in events.Scalars("eval/loss")] == [6]
    assert [event.step for event in events.Scalars("final/train_runtime")] == [6]
    (config,) = events.Tensors("config/text_summary")
    assert b'"learning_rate": 0.01' in config.tensor_proto.string_val[0]


def test_a_resumed_run_forgets_what_came_after_the_checkpoint(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    settings = {"max_steps": 8, "num_train_epochs": -1, "save_strategy": "steps", "save_steps": 3}
    tracker = TensorBoardCallback()
    killed = KilledAt(tracker, step=5)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(callbacks=[tracker, killed], **settings).train()
    folder = tmp_path / "run" / "tensorboard" / str(tracker.run_id)
    assert [event.step for event in read(folder).Scalars("train/loss")] == [1, 2, 3, 4, 5]

    again = TensorBoardCallback()
    again.load_state_dict(json.loads(killed.saved))
    trainer = make_trainer(callbacks=[again], **settings)
    trainer.train()
    assert again.run_id == tracker.run_id
    events = read(folder)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    marker = events.Scalars("session/resumed_at_step")
    assert [(event.step, event.value) for event in marker] == [(4, 3.0)]
    # The point of step 4 is that of the second part.
    assert events.Scalars("train/loss")[3].wall_time > events.Scalars("train/loss")[2].wall_time
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2


def test_a_second_run_has_a_folder_of_its_own(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    for _ in range(2):
        make_trainer(max_steps=2, callbacks=[TensorBoardCallback()]).train()
    folders = sorted((tmp_path / "run" / "tensorboard").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert [event.step for event in read(folder).Scalars("train/loss")] == [1, 2]


def test_report_to_is_enough(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=2, report_to="tensorboard")
    with pytest.raises(ConfigurationError, match="report_to='tensorboard' adds a TensorBoardCallback"):
        trainer.add_callback(TensorBoardCallback())
    trainer.train()
    (folder,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert [event.step for event in read(folder).Scalars("train/loss")] == [1, 2]
