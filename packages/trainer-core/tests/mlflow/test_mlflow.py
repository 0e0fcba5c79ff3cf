"""MLflowCallback on MLflow's own store, in SQLite."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from mlflow import MlflowClient

from trainer_core import Trainer
from trainer_core.callbacks import MLflowCallback


class KilledAt:
    """Keeps the tracker's state of the newest checkpoint, and ends the process's work at a step."""

    def __init__(self, tracker: MLflowCallback, step: int) -> None:
        self.tracker = tracker
        self.step = step
        self.saved = ""

    def on_save(self, args: object, state: object, control: object, **_: object) -> None:
        self.saved = json.dumps(self.tracker.state_dict())

    def on_log(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            raise KeyboardInterrupt


class Aborts:
    """Leaves at the first step."""

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        control.should_abort_without_save = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'runs.db'}"


def steps_of(client: MlflowClient, run_id: str, name: str) -> list[int]:
    return [metric.step for metric in client.get_metric_history(run_id, name)]


def test_curves_and_arguments_can_be_read_back(
    make_trainer: Callable[..., Trainer], ragged_loader: Callable[..., object], store: str
) -> None:
    tracker = MLflowCallback("experiment a", run_name="first", tracking_uri=store)
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4), num_train_epochs=1, eval_strategy="epoch", callbacks=[tracker]
    )
    trainer.train()
    client = MlflowClient(tracking_uri=store)
    run_id = str(tracker.run_id)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["learning_rate"] == "0.01"
    assert client.get_experiment(run.info.experiment_id).name == "experiment a"
    losses = {metric.step: metric.value for metric in client.get_metric_history(run_id, "train/loss")}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert losses == {entry["global_step"]: entry["loss"] for entry in history}
    assert steps_of(client, run_id, "eval/loss") == [6]
    assert steps_of(client, run_id, "final/train_runtime") == [6]


def test_a_resumed_run_goes_on_with_growing_steps(make_trainer: Callable[..., Trainer], store: str) -> None:
    settings = {"max_steps": 8, "num_train_epochs": -1, "save_strategy": "steps", "save_steps": 3}
    tracker = MLflowCallback(tracking_uri=store)
    killed = KilledAt(tracker, step=5)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(callbacks=[tracker, killed], **settings).train()
    client = MlflowClient(tracking_uri=store)
    run_id = str(tracker.run_id)
    assert client.get_run(run_id).info.status == "RUNNING"

    again = MLflowCallback(tracking_uri=store)
    again.load_state_dict(json.loads(killed.saved))
    # Another learning rate would be another value of a param, which MLflow refuses: they are stored once.
    make_trainer(callbacks=[again], **settings, save_total_limit=5).train()
    assert again.run_id == run_id
    assert steps_of(client, run_id, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    (marker,) = client.get_metric_history(run_id, "session/resumed_at_step")
    assert (marker.step, marker.value) == (6, 3.0)
    assert client.get_run(run_id).info.status == "FINISHED"


def test_an_aborted_run_has_failed(make_trainer: Callable[..., Trainer], store: str) -> None:
    tracker = MLflowCallback(tracking_uri=store)
    make_trainer(callbacks=[tracker, Aborts()], max_steps=4).train()
    assert MlflowClient(tracking_uri=store).get_run(str(tracker.run_id)).info.status == "FAILED"
