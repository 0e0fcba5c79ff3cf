"""One run owns its output directory: what another one is told there, and what it may still do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_core import CheckpointError, DirectoryLease, LeaseLostError
from perf_metrics import JsonLogger
from trainer_core import ConfigurationError, Trainer, TrainingArguments

MakeTrainer = Callable[..., Trainer]


class AtStep:
    """Does something once, in the middle of a run."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self._step = step
        self._action = action

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self._step:  # type: ignore[attr-defined]
            self._action()


def steps_of_log(directory: Path) -> list[int]:
    return [entry["global_step"] for entry in json.loads((directory / "trainer_logs.json").read_text())]


def test_a_second_run_is_refused_before_it_writes(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before: list[tuple[str, bytes]] = []

    def content() -> list[tuple[str, bytes]]:
        return [(str(path), path.read_bytes()) for path in sorted(run.rglob("*")) if path.is_file()]

    def start_another() -> None:
        before.extend(content())
        other = make_trainer(save_strategy="steps", callbacks=[JsonLogger()])
        told = f"output_dir='{run}' is in use by process {os.getpid()} on "
        with pytest.raises(ConfigurationError, match=told):
            other.train()
        with pytest.raises(ConfigurationError, match=told):
            other.save_checkpoint()
        assert content() == before
        with pytest.raises(CheckpointError, match=f"is in use by process {os.getpid()}"):
            other.save_model()
        first.save_model()
        assert (run / "model.safetensors").is_file()

    first = make_trainer(
        save_strategy="steps", save_steps=2, callbacks=[JsonLogger(), AtStep(3, start_another)]
    )
    output = first.train()
    assert before
    assert steps_of_log(run) == sorted(steps_of_log(run))
    assert (run / f"checkpoint-{output.global_step}").is_dir()
    assert not list(run.glob(".lease-*"))
    # It is free between two calls, for this trainer and for others.
    assert first.train().global_step == output.global_step
    assert make_trainer(save_strategy="steps").train().global_step == output.global_step


@pytest.mark.parametrize("fresh", [False, True])
def test_a_trainer_that_another_run_has_overtaken_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, fresh: bool
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
    first = make_trainer(**settings, max_steps=2)
    first.train()
    first.state.max_steps = 8
    another = {"resume_from_checkpoint": False, "overwrite_output_dir": True, "max_steps": 2} if fresh else {}
    make_trainer(**{"max_steps": 4, **settings, **another}).train()
    for refused in (first.train, first.save_checkpoint, first.train):
        with pytest.raises(
            ConfigurationError, match=r"was used by another run, which left .* Call load_check"
        ):
            refused()
    assert first.load_checkpoint()
    assert first.state.global_step == (2 if fresh else 4)
    first.state.max_steps = 6
    assert first.train().global_step == 6
    assert first.train().global_step == 6


def test_an_evaluation_beside_a_run_leaves_its_log_alone(
    make_trainer: MakeTrainer,
    ragged_loader: Callable[..., object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    with DirectoryLease(run):
        (run / "trainer_logs.json").write_text("[]\n")
        reader = make_trainer(eval_loader=ragged_loader(seed=3), callbacks=[JsonLogger()])
        assert reader.evaluate()["eval_loss"] > 0
        reader.save_model(str(tmp_path / "model"))
        assert not reader.load_checkpoint()
        assert (run / "trainer_logs.json").read_text() == "[]\n"
    assert "a record of this process is not written to its logs" in caplog.text
    reader.evaluate()
    assert steps_of_log(run) == [0]


@pytest.mark.parametrize("logs", [True, False])
def test_a_run_that_has_lost_its_directory_ends_before_it_writes(
    make_trainer: MakeTrainer, tmp_path: Path, logs: bool
) -> None:
    """As after a suspension in which another host took over, and has it now or has ended already."""
    run = tmp_path / "run"
    others: list[DirectoryLease] = []

    def lose() -> None:
        (run / ".lease-1").unlink()
        others.append(DirectoryLease(run).acquire())

    settings = {"logging_strategy": "steps" if logs else "no", "save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(**settings, callbacks=[JsonLogger(), AtStep(2, lose)])
    told = rf"{run} is no longer this run's own: its lease .lease-1 was taken over or removed; process \d+ on"
    with pytest.raises(LeaseLostError, match=told):
        trainer.train()
    others[0].check()
    assert steps_of_log(run) == ([1] if logs else [])
    assert not list(run.glob("checkpoint-*"))
    others[0].release()


def test_a_log_directory_of_two_runs_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")

    def start_another() -> None:
        with pytest.raises(ConfigurationError, match=f"logging_dir='{logs}' is in use by process"):
            make_trainer(output_dir=str(tmp_path / "other"), logging_dir=logs).train()

    make_trainer(logging_dir=logs, max_steps=3, callbacks=[AtStep(2, start_another)]).train()
    assert not (tmp_path / "other").exists()


def test_a_run_that_writes_nothing_needs_no_directory(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "run")
    assert make_trainer(output_dir=place, max_steps=2).train().global_step == 2
    with pytest.raises(ConfigurationError, match=r"output_dir=.*cannot take the lease of .*/file/run"):
        make_trainer(output_dir=place, max_steps=2, save_strategy="steps").train()


def test_its_times_are_checked() -> None:
    for times in ((0.0, 60.0), (21.0, 60.0), (3.0, 0.0)):
        with pytest.raises(ConfigurationError, match="lease_"):
            TrainingArguments(lease_heartbeat_seconds=times[0], lease_takeover_seconds=times[1])
