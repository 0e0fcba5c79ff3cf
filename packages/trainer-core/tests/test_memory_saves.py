"""Checkpoints in memory: a start after a loss continues from there, also one that was told to begin anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_core import ConfigurationError, Trainer, TrainingArguments
from trainer_core.memory_tier import RESTARTS_VARIABLE, has_memory_checkpoint, memory_directory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses memory of Linux")


class LostError(Exception):
    """What stands for the loss of a rank."""


class LoseAt:
    """Fails in a step, and keeps what was said of saves."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.saved: list[str] = []

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            raise LostError

    def on_memory_save(
        self, args: object, state: object, control: object, *, checkpoint_path: str, **_: object
    ) -> None:
        self.saved.append(checkpoint_path.rpartition("/")[2])


def losses(trainer: Trainer) -> list[tuple[object, object]]:
    return [(entry["global_step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_start_after_a_loss_continues_from_memory(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    settings: dict[str, object] = {"max_steps": 9, "save_strategy": "steps", "save_steps": 4, "dropout": 0.3}
    if fresh:
        make_trainer(**{**settings, "max_steps": 5}).train()  # an earlier run in the same directory
        settings |= {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    settings["memory_save_steps"] = 1
    lost = LoseAt(7)
    first = make_trainer(**settings, callbacks=[lost])
    with pytest.raises(LostError):
        first.train()
    assert lost.saved == [f"checkpoint-{step}" for step in range(1, 7)]
    assert has_memory_checkpoint(first.args)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = make_trainer(**settings)
    second.train()
    assert second.state.session_start_step == 6
    assert not has_memory_checkpoint(second.args)
    directory = memory_directory(second.args)
    assert directory is not None
    assert not directory.path.exists()
    assert second.saved_step == 9
    assert len(list(second.args.run_path.glob("previous-*"))) == fresh
    assert sorted(path.name for path in second.args.run_path.glob("checkpoint-*")) == [
        "checkpoint-8",
        "checkpoint-9",
    ]
    whole = make_trainer(
        **{**settings, "memory_save_steps": 0, "output_dir": str(second.args.run_path) + "2"}
    )
    whole.train()
    assert losses(second) == losses(whole)


def test_a_run_whose_memory_becomes_short_continues_without_the_save(
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    free = [1 << 40]
    monkeypatch.setattr("checkpoint_core.memory_room._room", lambda *_: [(free[0], "the memory")])

    class Shortens(LoseAt):
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            short = state.global_step in (2, 3)  # type: ignore[attr-defined]
            free[0] = 0 if short else 1 << 40

    seen = Shortens(0)
    trainer = make_trainer(max_steps=4, save_strategy="steps", memory_save_steps=1, callbacks=[seen])
    trainer.train()
    assert seen.saved == ["checkpoint-1", "checkpoint-4"]
    assert trainer.saved_step == 4
    assert "saving checkpoint-2: not enough memory for checkpoints" in caplog.text


def test_a_run_that_is_at_its_end_in_memory_saves_it_on_storage(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    settings: dict[str, object] = {"max_steps": 4, "save_strategy": "steps", "memory_save_steps": 2}

    class LoseAfter:
        def on_memory_save(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step == 4:  # type: ignore[attr-defined]
                raise LostError

    with pytest.raises(LostError):
        make_trainer(**settings, callbacks=[LoseAfter()]).train()
    trainer = make_trainer(**settings)
    trainer.train()
    assert (trainer.state.session_start_step, trainer.saved_step) == (4, 4)
    assert [path.name for path in trainer.args.run_path.glob("checkpoint-*")] == ["checkpoint-4"]


def start_again(monkeypatch: pytest.MonkeyPatch, args: TrainingArguments, *, damaged: bool) -> None:
    """Let this process pass for a later start of the job, whose checkpoints in memory may be damaged."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    directory = memory_directory(args)
    assert directory is not None
    for path in directory.path.glob("checkpoint-*/*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 255 * damaged  # of its size still
        path.write_bytes(content)


def test_a_checkpoint_to_begin_from_is_begun_from_again_where_none_in_memory_is_good(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    make_trainer(max_steps=2, save_strategy="steps", output_dir=str(tmp_path / "before")).train()
    source = tmp_path / "before" / "checkpoint-2"
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 9, "memory_save_steps": 1}
    settings |= {"resume_from_checkpoint": str(source), "output_dir": str(tmp_path / "run")}
    first = make_trainer(**settings, callbacks=[LoseAt(5)])
    with pytest.raises(LostError):
        first.train()
    start_again(monkeypatch, first.args, damaged=True)
    second = make_trainer(**settings)
    second.train()
    assert second.state.session_start_step == 2
    assert second.checkpoint_manager.loaded is not None
    assert second.checkpoint_manager.loaded.path == source


@pytest.mark.parametrize("construct_model_on", ["default", "meta"])
def test_initial_weights_are_begun_with_again_where_no_checkpoint_is_good(
    make_trainer: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    construct_model_on: str,
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    source = make_trainer(max_steps=2, output_dir=str(tmp_path / "before"))
    source.train()
    source.save_model(str(tmp_path / "weights"))
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 9, "memory_save_steps": 1}
    settings |= {"output_dir": str(tmp_path / "run"), "construct_model_on": construct_model_on}
    weights = {"with_trainer": {"initial_weights": tmp_path / "weights"}}
    first = make_trainer(**settings, **weights, callbacks=[LoseAt(3)])
    with pytest.raises(LostError):
        first.train()
    start_again(monkeypatch, first.args, damaged=True)
    begun: list[dict[str, torch.Tensor]] = []

    class Look:
        def on_train_begin(self, args: object, state: object, control: object, **given: object) -> None:
            begun.append({name: each.clone() for name, each in given["model"].state_dict().items()})  # type: ignore[attr-defined]

    second = make_trainer(**settings, **weights, callbacks=[Look()])
    second.train()
    assert second.state.session_start_step == 0
    for name, value in source.model.state_dict().items():
        torch.testing.assert_close(begun[0][name], value)


def test_a_run_with_checkpoints_in_memory_alone_leaves_those_of_another_run_on_storage(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTS_VARIABLE, "3")
    make_trainer(max_steps=5, save_strategy="steps").train()
    settings = {"max_steps": 6, "save_strategy": "no", "memory_save_steps": 1}
    settings["resume_from_checkpoint"] = False
    first = make_trainer(**settings, callbacks=[LoseAt(3)])
    with pytest.raises(LostError):
        first.train()
    start_again(monkeypatch, first.args, damaged=False)
    second = make_trainer(**settings)
    second.train()
    assert second.state.session_start_step == 2
    assert (second.args.run_path / "checkpoint-5").is_dir()


@pytest.mark.parametrize("value", [None, "0"])
def test_it_is_refused_where_nothing_starts_the_process_again(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(RESTARTS_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(RESTARTS_VARIABLE, value)
    with pytest.raises(ConfigurationError, match=r"memory_save_steps.*torchrun --max-restarts 3"):
        make_trainer(memory_save_steps=1, save_strategy="steps").train()
