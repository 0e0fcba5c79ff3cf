"""Pieces of runs, memory that is read into directly, and space where it cannot be reserved."""

import ctypes
import errno
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_core import tensor_files
from checkpoint_core.encoding import LocalPart, copy_values, same_bits
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import checksum_file, combine
from checkpoint_core.tensor_files import TensorFileReader, create_tensor_file, plan_file, spec_of, write_parts


def test_only_memory_of_another_form_is_read_through_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_safetensors
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
    assert sorted(copied) == ["cast", "conjugated", "negated", "strided"]


def test_a_big_endian_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_safetensors
) -> None:
    """Whatever it wrote would be read with its bytes in the wrong order."""
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(CheckpointError, match="this machine is big-endian"):
        write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(3)}, {})


def test_runs_longer_than_a_piece_end_where_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a matrix are several runs of the file, of which each is cut into pieces."""
    monkeypatch.setattr(tensor_files, "_PIECE_BYTES", 64)
    values = torch.arange(300, dtype=torch.int32).reshape(3, 100)
    layout = plan_file({"a": spec_of(values)}, {})
    path = tmp_path / "x.safetensors"
    shares = [create_tensor_file(path, layout)]
    for columns in (slice(0, 30), slice(30, 100)):
        part = LocalPart((3, 100), (0, columns.start), values[:, columns], None)
        shares.append(write_parts(path, layout, {"a": part}))
    assert combine(shares) == checksum_file(path).checksum
    with TensorFileReader(path) as reader:
        assert torch.equal(reader.read("a"), values)


class LibraryThatRefuses:
    """A C library whose `fallocate` fails, and tells why to those who ask for it.

    Args:
        number: The error; None: there is no such function.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __call__(self, name: None, *, use_errno: bool) -> object:
        if self.number is not None:
            self.fallocate = self._fail
            ctypes.set_errno(0)
        self.tells = use_errno
        return self

    def _fail(self, *_: object) -> int:
        if self.tells and self.number is not None:
            ctypes.set_errno(self.number)
        return -1


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, None])
def test_a_file_has_its_size_also_where_space_cannot_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest_file, number: int | None
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", LibraryThatRefuses(number))
    layout = plan_file({"a": spec_of(torch.empty(1000))}, {})
    create_tensor_file(tmp_path / "x", layout)
    assert (tmp_path / "x").stat().st_size == layout.size
    with largest_file(1000), pytest.raises(OSError, match="File too large") as caught:
        create_tensor_file(tmp_path / "y", layout)
    assert caught.value.filename == str(tmp_path / "y")


def test_a_full_disk_is_told_when_space_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", LibraryThatRefuses(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as caught:
        create_tensor_file(tmp_path / "x", plan_file({"a": spec_of(torch.empty(10))}, {}))
    assert caught.value.filename == str(tmp_path / "x")
