"""Running the same script or cell again: what is said, what is returned, and how a run begins anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from checkpoint_core import CheckpointError
from perf_metrics import JsonLogger, load_logs
from trainer_core import ConfigurationError, EarlyStopping, Trainer, TrainingArguments

MakeTrainer = Callable[..., Trainer]
SAID = "nothing left to train: step 12 of 12. A larger max_steps"


@pytest.fixture
def make(tiny_model: type, tmp_path: Path) -> MakeTrainer:
    """Builds a trainer over a dataset of 5 steps an epoch, which saves in one directory."""
    ids = torch.randint(0, 23, (20, 6), generator=torch.Generator().manual_seed(1))

    def make(callbacks: Sequence[object] = (), given: dict[str, object] | None = None) -> Trainer:
        args = TrainingArguments(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=4,
            max_steps=12,
            seed=7,
            logging_steps=1,
            learning_rate=1e-2,
        )
        data = [{"input_ids": row, "labels": row} for row in ids]
        parts = {"model_init": tiny_model, "train_dataset": data, **(given or {})}
        return Trainer(args, callbacks=callbacks, **parts)  # type: ignore[arg-type]

    return make


def test_a_finished_run_says_so_and_returns_its_metrics(
    make: MakeTrainer,
    curve: Callable[[Trainer], list[tuple[float, float]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    trainer = make([JsonLogger()])
    output = trainer.train()
    assert "nothing left" not in caplog.text
    losses = [loss for loss, _ in curve(trainer)]
    # Every step has as many tokens.
    assert output.metrics["train_loss"] == pytest.approx(sum(losses) / 12)
    assert all(entry["step"] == entry["global_step"] for entry in trainer.state.log_history)

    assert trainer.train() == output
    assert caplog.text.count(SAID) == 1
    assert sum("train_runtime" in entry for entry in trainer.state.log_history) == 1
    # The same script once more: the checkpoint knows them, as of its step.
    other = make([JsonLogger()])
    again = other.train()
    assert caplog.text.count(SAID) == 2
    assert again.metrics.keys() == output.metrics.keys()
    for name in ("train_loss", "total_tokens", "timed_steps", "epoch"):
        assert again.metrics[name] == output.metrics[name], name
    assert curve(other) == curve(trainer)
    final = load_logs(tmp_path / "run" / "trainer_logs.json")[-1]
    assert (final["train_loss"], final["timed_steps"]) == (output.metrics["train_loss"], 11)


def test_fresh_begins_anew_in_the_same_trainer_and_in_another(
    make: MakeTrainer, curve: Callable[[Trainer], list[tuple[float, float]]], tmp_path: Path
) -> None:
    trainer = make([JsonLogger()])
    first = trainer.train()
    expected, model = curve(trainer), trainer.model
    (tmp_path / "run" / "notes.txt").write_text("mine")
    again = trainer.train(fresh=True)
    assert trainer.model is not model
    assert curve(trainer) == expected
    assert again.metrics["train_loss"] == first.metrics["train_loss"]
    assert again.metrics["total_tokens"] == first.metrics["total_tokens"]

    trainer.save_model(str(tmp_path / "model"))
    with pytest.raises(CheckpointError):  # fresh says nothing about it
        trainer.save_model(str(tmp_path / "model"))

    other = make([JsonLogger()])
    other.model  # noqa: B018  # built, and nothing more
    other.train(fresh=True)
    assert curve(other) == expected
    assert other.state.session_start_step == 0
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith("."))
    assert [name for name in names if "previous" not in name] == [
        "checkpoint-12",
        "notes.txt",
        "trainer_logs.json",
    ]
    for folder in (tmp_path / "run").glob("previous-*"):
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-12", "trainer_logs.json"]
    assert sum("previous" in name for name in names) == 2


@pytest.mark.parametrize(
    ("given", "callbacks", "why"),
    [
        ("model", [], "model was given instead of model_init"),
        ("loader", [], "train_dataset is a loader that keeps its position"),
        ("", [EarlyStopping(metric="train_loss", patience=100)], "the callback early_stopping keeps a state"),
    ],
)
def test_what_cannot_begin_anew_is_refused(
    make: MakeTrainer,
    tiny_model: type,
    ragged_loader: Callable[..., object],
    tmp_path: Path,
    given: str,
    callbacks: list[object],
    why: str,
) -> None:
    parts = {
        "model": {"model": tiny_model(), "model_init": None},
        "loader": {"train_dataset": ragged_loader()},
    }
    trainer = make(callbacks, parts.get(given))
    trainer.train()
    with pytest.raises(ConfigurationError, match=f"because {why}. Make a new Trainer"):
        trainer.train(fresh=True)
    assert trainer.state.global_step == 12
    assert not list((tmp_path / "run").glob("previous-*"))
