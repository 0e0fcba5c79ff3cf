"""What can be shown without CUDA; on a CUDA machine the same tests look at real snapshots."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer_core import ConfigurationError, Trainer
from trainer_core.callbacks import MemorySnapshotCallback, dump_on_oom

HAS_CUDA = torch.cuda.is_available()


def test_steps_are_recorded_or_the_reason_is_given_once(
    make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_trainer(max_steps=6, num_train_epochs=-1, callbacks=[MemorySnapshotCallback(2, 3)]).train()
    snapshot = tmp_path / "run" / "memory" / "steps-00000002-00000003-rank0.pickle"
    assert snapshot.exists() == HAS_CUDA
    said = [text for text in caplog.messages if "MemorySnapshotCallback is unavailable" in text]
    assert len(said) == (0 if HAS_CUDA else 1)
    assert all("sees no CUDA device" in text for text in said)


def test_running_out_of_memory_leaves_a_report_and_goes_on_up(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate"), dump_on_oom(tmp_path / "logs"):
        raise torch.OutOfMemoryError("tried to allocate 1 PiB")
    report = (tmp_path / "logs" / "oom-rank0.txt").read_text()
    assert report.startswith("tried to allocate 1 PiB\n")
    assert ("memory summary unavailable: torch" in report) != HAS_CUDA
    assert (tmp_path / "logs" / "oom-rank0.pickle").exists() == HAS_CUDA


def test_a_report_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "logs"
    in_the_way.write_text("a file, not a folder")
    with pytest.raises(torch.OutOfMemoryError), dump_on_oom(in_the_way):
        raise torch.OutOfMemoryError("tried to allocate 1 PiB")
    assert "the report could not be written" in caplog.text


def test_other_errors_pass_untouched(tmp_path: Path) -> None:
    with pytest.raises(KeyError), dump_on_oom(tmp_path / "logs"):
        raise KeyError("other")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_step": 0}, "first_step=0 must be 1 or more"),
        ({"first_step": 5, "last_step": 4}, "last_step=4 is before first_step=5"),
        ({"max_entries": 0}, "max_entries=0 must be 1 or more"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MemorySnapshotCallback(**settings)
