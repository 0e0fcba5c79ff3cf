"""The checksum of a file from what each of its writers knows, and the files that tensors are written to."""

import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from safetensors.torch import load_file

from checkpoint_core.encoding import LocalPart
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import ALGORITHM, PartialDigest, checksum_file, combine, digest
from checkpoint_core.tensor_files import TensorFileReader, create_tensor_file, plan_file, spec_of, write_parts

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))


def test_the_check_value_of_the_algorithm() -> None:
    # RFC 3720, appendix B.4: 32 bytes of zeros, of ones, and counting up.
    assert ALGORITHM == "crc32c"
    assert digest(b"123456789") == "e3069283"
    for data, expected in (
        (bytes(32), "8a9136aa"),
        (b"\xff" * 32, "62a8ab43"),
        (bytes(range(32)), "46dd794e"),
        (b"", "00000000"),
    ):
        whole = PartialDigest()
        whole.update(0, data)
        assert digest(data) == combine([whole.share(len(data))]) == expected


@pytest.mark.parametrize("size", [1, 7, 1000, 70_000])
def test_pieces_of_any_writers_make_up_the_checksum(size: int) -> None:
    for example in range(5 * EXAMPLES):
        generator = random.Random(f"{size} {example}")
        data = generator.randbytes(size)
        cuts = sorted({0, size, *(generator.randrange(size) for _ in range(generator.randint(0, 8)))})
        writers = [PartialDigest() for _ in range(3)]
        for begin, end in pairwise(cuts):
            generator.choice(writers).update(begin, data[begin:end])
        assert combine(writer.share(size) for writer in writers) == f"{crc32c(data):08x}"
    # A writer of nothing adds nothing, wherever the file ends.
    assert PartialDigest().share(size) == 0
    assert combine([]) == "00000000"


def test_what_is_written_is_counted_and_read(tmp_path: Path, write_safetensors) -> None:
    tensors = {
        "a": torch.arange(5_000_000, dtype=torch.int32),
        "b": torch.tensor(True),
        "none": torch.empty(0, 3),
    }
    path = tmp_path / "x.safetensors"
    record = write_safetensors(path, tensors, {"format": "pt"}, threads=2)
    assert record == checksum_file(path)
    assert record.size == path.stat().st_size
    stored = load_file(path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    with TensorFileReader(path) as reader:
        header = reader.bytes_read
        assert header == record.size - 20_000_001
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
        assert reader.bytes_read == record.size
        descriptor = reader._descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(CheckpointError, match=r"two parts of the checkpoint want to write x\.safetensors"):
        write_safetensors(path, tensors, {})


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_space_is_reserved_and_nothing_is_left_open(tmp_path: Path, largest_file) -> None:
    layout = plan_file({"a": spec_of(torch.empty(1_000_000))}, {})
    before = open_files()
    path = tmp_path / "x.safetensors"
    create_tensor_file(path, layout)
    assert path.stat().st_size == layout.size
    assert path.stat().st_blocks * 512 >= layout.size
    part = LocalPart((1_000_000,), (0,), torch.ones(1_000_000), None)
    write_parts(path, layout, {"a": part})
    with largest_file(1000), pytest.raises(OSError, match="File too large") as caught:
        create_tensor_file(tmp_path / "y.safetensors", layout)
    assert caught.value.filename == str(tmp_path / "y.safetensors")
    with largest_file(1000), pytest.raises(OSError, match="File too large"):
        write_parts(path, layout, {"a": part})
    assert open_files() == before


def test_a_file_that_ends_while_it_is_read(tmp_path: Path, write_safetensors) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.ones(100)}, {})
    with TensorFileReader(path) as reader:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="ended while it was being read"):
            reader.read("a")


def test_all_is_on_the_disk_before_it_appears(
    job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, what has its name must have its content."""
    synced: dict[int, object] = {}
    fsync = os.fsync

    def content(place: Path) -> object:
        return sorted(entry.name for entry in place.iterdir()) if place.is_dir() else place.read_bytes()

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = content(Path(f"/proc/self/fd/{descriptor}").resolve())

    monkeypatch.setattr(os, "fsync", watched)
    run = job()
    run.train(1)
    checkpoint = run.save()
    places = [checkpoint.parent, checkpoint, *checkpoint.rglob("*")]
    assert len(places) > 5
    assert [place.name for place in places if synced.get(place.stat().st_ino) != content(place)] == []
