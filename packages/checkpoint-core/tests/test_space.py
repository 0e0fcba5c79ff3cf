"""No room: refused before writing where it can be known, and harmless where it comes as a surprise."""

from pathlib import Path

import pytest
import torch

from checkpoint_core import CheckpointError, SharingPattern, StateComponent, find_latest_checkpoint
from checkpoint_core.errors import free_bytes


class Tensors:
    """A component that holds one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, object]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.tensor = state["tensor"]


def test_a_write_that_fails_half_way(largest_file, job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = job()
    first.train(1)
    first.save()
    big = Tensors(torch.randn(300_000))
    first.components.append(StateComponent(key="big", stateful=big, sharing_pattern=SharingPattern.GLOBAL))
    with largest_file(500_000), pytest.raises(CheckpointError) as caught:
        first.manager.save_checkpoint(2)
    message = str(caught.value)
    assert "no space left to write" in message
    assert "big.safetensors" in message
    assert "bytes are free there" in message
    assert "raise the quota or file size limit" in message
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"]
    assert find_latest_checkpoint(run, verify_checksums=True).name == "checkpoint-1"
    first.manager.save_checkpoint(2)
    assert find_latest_checkpoint(run, verify_checksums=True).name == "checkpoint-2"


def test_too_large_is_refused_before_writing(job, tmp_path: Path) -> None:
    first = job()
    first.train(1)
    first.save()
    # A tensor of 4 PB that occupies four bytes: what counts is what would be written.
    huge = Tensors(torch.zeros(1).expand(10**15))
    first.components.append(StateComponent(key="huge", stateful=huge, sharing_pattern=SharingPattern.GLOBAL))
    with pytest.raises(CheckpointError, match=r"it needs 4\d{15} bytes .* has \d+ bytes free"):
        first.manager.save_checkpoint(2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def test_an_output_directory_that_cannot_be(job, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=r"saving checkpoint-1: .*run"):
        job().manager.save_checkpoint(1)
    assert (tmp_path / "run").read_text() == "a file"


def test_free_space_of_a_path_to_be_made(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
