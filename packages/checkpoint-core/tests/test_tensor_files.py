"""Which memory is read into directly, and which machine may write."""

import sys
from pathlib import Path

import pytest
import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage import tensor_files
from checkpoint_core.storage.memory import copy_values, same_bits
from checkpoint_core.storage.tensor_files import TensorFileReader, write_safetensors


def test_only_memory_of_another_form_is_read_through_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(12.0).reshape(4, 3)
    stored = dict.fromkeys(("plain", "cast", "negated", "strided"), values)
    stored["conjugated"] = torch.complex(values, values + 0.5)
    targets = {
        "plain": torch.empty(4, 3),
        "cast": torch.empty(4, 3, dtype=torch.float64),
        "negated": torch._neg_view(torch.empty(4, 3)),
        "strided": torch.empty(3, 4).t(),
        "conjugated": torch.empty(4, 3, dtype=torch.complex64).conj(),
    }
    copied = []

    def copy_and_note(target: torch.Tensor, values: torch.Tensor, where: str) -> None:
        copied.append(where)
        copy_values(target, values, where)

    monkeypatch.setattr(tensor_files, "copy_values", copy_and_note)
    write_safetensors(tmp_path / "x.safetensors", stored, {})
    with TensorFileReader(tmp_path / "x.safetensors") as reader:
        reader.fill(list(targets.items()))
    for name, target in targets.items():
        assert same_bits(target, stored[name].to(target.dtype)), name
    assert copied == ["cast", "negated", "strided", "conjugated"]


def test_a_big_endian_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it wrote would be read with its bytes in the wrong order."""
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="this machine is big-endian"):
        write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(3)}, {})
