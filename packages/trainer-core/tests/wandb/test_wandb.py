"""WandbCallback with offline runs, read back from their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import wandb

from trainer_core import Trainer
from trainer_core.callbacks import WandbCallback

Rows = Callable[[Path], list[dict[str, object]]]


class KilledAt:
    """Keeps the tracker's state of the newest checkpoint, and ends the process's work at a step."""

    def __init__(self, tracker: WandbCallback, step: int) -> None:
        self.tracker = tracker
        self.step = step
        self.saved = ""

    def on_save(self, args: object, state: object, control: object, **_: object) -> None:
        self.saved = json.dumps(self.tracker.state_dict())

    def on_log(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")


def offline_runs(log_dir: Path) -> list[Path]:
    return sorted((log_dir / "wandb").glob("offline-run-*"))


def column(rows: list[dict[str, object]], name: str) -> dict[object, object]:
    return {row["_step"]: row[name] for row in rows if name in row}


def test_an_offline_run_holds_the_curves(
    make_trainer: Callable[..., Trainer],
    ragged_loader: Callable[..., object],
    offline_rows: Rows,
    offline_config: Callable[[Path], dict[str, object]],
    tmp_path: Path,
) -> None:
    tracker = WandbCallback("tests", run_name="first", tags=["small"])
    trainer = make_trainer(
        eval_loader=ragged_loader(rows=4), num_train_epochs=1, eval_strategy="epoch", callbacks=[tracker]
    )
    trainer.train()
    assert wandb.run is None
    (folder,) = offline_runs(tmp_path / "run")
    assert folder.name.endswith(str(tracker.run_id))
    rows = offline_rows(folder)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert column(rows, "train/loss") == {entry["global_step"]: entry["loss"] for entry in history}
    assert list(column(rows, "eval/loss")) == [6]
    assert list(column(rows, "final/train_runtime")) == [6]
    config = offline_config(folder)
    assert (config["learning_rate"], config["lr_scheduler_type"]) == (1e-2, "cosine")


def test_a_resumed_run_has_the_same_id_and_growing_steps(
    make_trainer: Callable[..., Trainer], offline_rows: Rows, tmp_path: Path
) -> None:
    settings = {"max_steps": 8, "num_train_epochs": -1, "save_strategy": "steps", "save_steps": 3}
    tracker = WandbCallback("tests")
    killed = KilledAt(tracker, step=5)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(callbacks=[tracker, killed], **settings).train()
    # A real kill would end the process; here W&B must be told, as its exit hook would.
    wandb.finish(exit_code=1)
    again = WandbCallback("tests")
    again.load_state_dict(json.loads(killed.saved))
    make_trainer(callbacks=[again], **settings).train()
    assert again.run_id == tracker.run_id
    first, second = offline_runs(tmp_path / "run")
    assert str(tracker.run_id) in first.name
    assert str(tracker.run_id) in second.name
    rows = offline_rows(first) + offline_rows(second)
    assert list(column(rows, "train/loss")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["_step"] for row in rows] == sorted(row["_step"] for row in rows)  # type: ignore[type-var]
    assert column(rows, "session/resumed_at_step") == {6: 3.0}


def test_an_active_run_is_used_and_left_open(
    make_trainer: Callable[..., Trainer], offline_rows: Rows, tmp_path: Path
) -> None:
    run = wandb.init(project="tests", dir=tmp_path)
    tracker = WandbCallback("tests")
    make_trainer(max_steps=2, callbacks=[tracker]).train()
    assert wandb.run is run
    assert tracker.run_id == run.id
    wandb.finish()
    (folder,) = offline_runs(tmp_path)
    assert list(column(offline_rows(folder), "train/loss")) == [1, 2]
