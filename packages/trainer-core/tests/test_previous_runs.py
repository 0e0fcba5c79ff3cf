"""A start that does not continue what is in its directory replaces nothing there, and stays apart from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_core import find_latest_checkpoint
from perf_metrics import JsonLogger, load_logs
from trainer_core import ConfigurationError, Trainer

SETTINGS = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": None}


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in directory.glob("checkpoint-*"))


def previous(directory: Path) -> Path:
    (folder,) = directory.glob("previous-*")
    return folder


@pytest.fixture
def run(make_trainer: Callable[..., Trainer], tmp_path: Path) -> Path:
    """The directory of a run of 6 steps."""
    make_trainer(max_steps=6, num_train_epochs=-1, callbacks=[JsonLogger()], **SETTINGS).train()
    return tmp_path / "run"


def test_without_its_counters_a_checkpoint_does_not_begin_a_run_beside_itself(
    make_trainer: Callable[..., Trainer], run: Path, tmp_path: Path
) -> None:
    (run / "checkpoint-6" / "trainer.json").unlink()
    newest = run / "checkpoint-6"
    before = (newest / "manifest.json").read_bytes()
    for wanted in (True, str(newest)):
        again = make_trainer(max_steps=8, num_train_epochs=-1, resume_from_checkpoint=wanted, **SETTINGS)
        with pytest.raises(ConfigurationError, match=r"lacks trainer\.json.*another output_dir"):
            again.train()
    assert steps(run) == [2, 4, 6]
    assert (newest / "manifest.json").read_bytes() == before
    # The way out that is named.
    elsewhere = {"output_dir": str(tmp_path / "new"), "resume_from_checkpoint": str(newest)}
    trainer = make_trainer(max_steps=2, num_train_epochs=-1, **SETTINGS | elsewhere)
    trainer.train()
    assert trainer.state.log_history[0]["global_step"] == 1
    assert steps(tmp_path / "new") == [2]


def test_a_fresh_start_is_refused_and_names_the_way_out(
    make_trainer: Callable[..., Trainer], run: Path
) -> None:
    with pytest.raises(ConfigurationError, match="overwrite_output_dir=True, which moves"):
        make_trainer(max_steps=2, num_train_epochs=-1, resume_from_checkpoint=False, **SETTINGS).train()
    assert steps(run) == [2, 4, 6]


def test_a_fresh_start_moves_the_old_run_aside(
    make_trainer: Callable[..., Trainer], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = load_logs(run / "trainer_logs.json")
    fresh = {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    trainer = make_trainer(max_steps=2, num_train_epochs=-1, callbacks=[JsonLogger()], **SETTINGS | fresh)
    trainer.train()
    folder = previous(run)
    assert (
        f"moved aside to {folder}: checkpoint-2, checkpoint-4, checkpoint-6, trainer_logs.json" in caplog.text
    )
    assert steps(folder) == [2, 4, 6]
    assert load_logs(folder / "trainer_logs.json") == before
    assert (steps(run), find_latest_checkpoint(run)) == ([2], run / "checkpoint-2")
    assert [entry["global_step"] for entry in load_logs(run / "trainer_logs.json")] == [1, 2, 2]
    # The second call continues, and a start without the two settings as well.
    trainer.train()
    make_trainer(max_steps=4, num_train_epochs=-1, **SETTINGS).train()
    assert steps(run) == [2, 4]
    assert previous(run) == folder


def test_going_back_leaves_no_later_checkpoint_to_be_preferred(
    make_trainer: Callable[..., Trainer], run: Path
) -> None:
    back = {"resume_from_checkpoint": str(run / "checkpoint-2"), "save_steps": 1}
    trainer = make_trainer(max_steps=3, num_train_epochs=-1, **SETTINGS | back)
    trainer.train()
    assert steps(run) == [2, 3]
    assert steps(previous(run)) == [4, 6]
