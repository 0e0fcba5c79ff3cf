"""WandbCallback with offline runs, read back from their files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import wandb

from trainer_core import Trainer
from trainer_core.callbacks import WandbCallback

Rows = Callable[[Path], list[dict[str, object]]]


# One session of a run, interrupted when it has logged a step. Each has a process of its own, because W&B's
# service takes a run that begins again at once under the same id for the one just ended.
SESSION = """
import sys, torch
from trainer_core import Trainer
from trainer_core.callbacks import WandbCallback


class Interrupted:
    def on_log(self, args, state, control, **_):
        if state.global_step == int(sys.argv[2]):
            raise KeyboardInterrupt


class Bigram(torch.nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids)


settings = {"output_dir": sys.argv[1], "per_device_train_batch_size": 2, "max_steps": 8, "seed": 1}
rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).remainder(23).view(16, 4)]
tracker = WandbCallback("tests")
try:
    Trainer(
        settings | {"logging_steps": 1, "save_steps": 3},
        model_init=lambda: Bigram(23, 23),
        train_dataset=rows,
        callbacks=[tracker, Interrupted()],
    ).train()
finally:
    print("run", tracker.run_id)
"""


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


def test_a_resumed_run_has_the_same_id_and_growing_steps(offline_rows: Rows, tmp_path: Path) -> None:
    ids = set()
    # Without the service of this process, which other tests have begun.
    env = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for interrupted_at in (5, 0):
        command = [sys.executable, "-c", SESSION, str(tmp_path), str(interrupted_at)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        # Hooks of wandb at the exit leave another code than a signal's.
        assert bool(done.returncode) is bool(interrupted_at), done.stderr
        ids |= {line for line in done.stdout.splitlines() if line.startswith("run ")}
    (run_id,) = ids
    first, second = offline_runs(tmp_path)
    assert first.name.endswith(run_id.removeprefix("run "))
    assert second.name.endswith(run_id.removeprefix("run "))
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
