"""Arguments and state of a run, for tests that call handlers by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_core import TrainerState, TrainingArguments


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., TrainingArguments]:
    def make(**settings: object) -> TrainingArguments:
        return TrainingArguments(output_dir=str(tmp_path / "run"), **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def state() -> Callable[..., TrainerState]:
    def make(step: int = 0, **fields: object) -> TrainerState:
        given = {
            "logging_steps": 1,
            "eval_steps": 1,
            "train_batch_size": 4,
            "max_steps": 20,
            "num_train_epochs": 1.0,
            "max_eval_steps": -1,
            "global_step": step,
        }
        return TrainerState(**(given | fields))  # type: ignore[arg-type]

    return make
