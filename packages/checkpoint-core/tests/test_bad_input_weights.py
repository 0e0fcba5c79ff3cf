"""Bad input when loading weights of a Hugging Face directory: indexes, pickles, damage, missing files."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from checkpoint_core import CheckpointError, ModelState, load_model_weights


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    """A bomb that nothing in the test may set off."""
    yield Bomb(tmp_path / "exploded")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_that_begins_like_a_pickle(tmp_path: Path, length: int) -> None:
    """The first bytes of a file are the length of its header: 640 is 80 02 00..., as pickles begin."""
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    for pad in range(length):
        save_file(tensors, tmp_path / "model.safetensors", {"pad": "x" * pad})
        if (tmp_path / "model.safetensors").read_bytes()[:8] == length.to_bytes(8, "little"):
            break
    model = nn.Linear(2, 2)
    load_model_weights(model, tmp_path)
    assert torch.equal(model.weight, torch.ones(2, 2))


def write_index(directory: Path, document: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(document))


HF_DIRECTORIES: dict[str, tuple[Callable[[Path, Bomb], object], str]] = {
    "nothing": (lambda d, b: None, "holds neither model.safetensors nor model.safetensors.index.json"),
    "pytorch_model.bin": (
        lambda d, b: torch.save(b, d / "pytorch_model.bin"),
        "It has pytorch_model.bin, a pickle that is never read. Convert it",
    ),
    "consolidated.pth": (
        lambda d, b: torch.save(b, d / "consolidated.pth"),
        "It has consolidated.pth, a pickle",
    ),
    "torch.save": (lambda d, b: torch.save(b, d / "model.safetensors"), "model.safetensors is a pickle"),
    "pickle": (
        lambda d, b: (d / "model.safetensors").write_bytes(pickle.dumps(b)),
        "model.safetensors is a pickle",
    ),
    "index of a pickle": (
        lambda d, b: (write_index(d, {"weight_map": {"weight": "a.bin"}}), torch.save(b, d / "a.bin")),
        "index.json names 'a.bin', which is not a safetensors file",
    ),
    "index outside": (
        lambda d, b: write_index(d, {"weight_map": {"weight": "../a.safetensors"}}),
        "index.json points outside its directory: '../a.safetensors'",
    ),
    "index absolute": (
        lambda d, b: write_index(d, {"weight_map": {"weight": "/etc/a.safetensors"}}),
        "points outside its directory: '/etc/a.safetensors'",
    ),
    "index of the parent": (
        lambda d, b: write_index(d, {"weight_map": {"weight": ".."}}),
        "outside its directory",
    ),
    "index of nothing": (
        lambda d, b: write_index(d, {"weight_map": {"weight": ""}}),
        "outside its directory",
    ),
    "index with a null": (
        lambda d, b: write_index(d, {"weight_map": {"weight": "a\0.safetensors"}}),
        "outside its directory",
    ),
    "missing shard": (
        lambda d, b: write_index(d, {"weight_map": {"weight": "a.safetensors"}}),
        "names a.safetensors, which is not there. Restore that file",
    ),
    "no map": (lambda d, b: write_index(d, {"metadata": {}}), "index.json has no weight_map"),
    "no JSON": (
        lambda d, b: (d / "model.safetensors.index.json").write_bytes(pickle.dumps(b)),
        "not valid JSON",
    ),
    "directory": (lambda d, b: (d / "model.safetensors").mkdir(), "holds neither model.safetensors nor"),
    "empty": (lambda d, b: (d / "model.safetensors").write_bytes(b""), "is not a readable safetensors file"),
}


@pytest.mark.parametrize("case", HF_DIRECTORIES)
def test_hugging_face_directories(tmp_path: Path, bomb: Bomb, case: str) -> None:
    make, message = HF_DIRECTORIES[case]
    directory = tmp_path / "model"
    directory.mkdir()
    make(directory, bomb)
    model = nn.Linear(2, 2)
    before = model.weight.tolist()
    with pytest.raises(CheckpointError) as caught:
        load_model_weights(model, directory)
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)
    assert model.weight.tolist() == before


def write_model(directory: Path) -> Path:
    path = directory / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    return path


def test_every_byte_of_a_header(tmp_path: Path) -> None:
    """Without a manifest there is no checksum, but a header that does not fit is never half read."""
    path = write_model(tmp_path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for place in range(end):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            model = nn.Linear(2, 2)
            before = model.weight.tolist(), model.bias.tolist()
            try:
                load_model_weights(model, tmp_path)
            except CheckpointError as error:
                refused += 1
                assert (model.weight.tolist(), model.bias.tolist()) == before
                assert str(path) in str(error) or "Build the model" in str(error)  # noqa: PT017
    # What is left: white space, and the digits of offsets that name no other place.
    assert refused > end * 8 * 9 // 10


@pytest.mark.parametrize("change", [b"", b"\0", b"\0" * 1000])
def test_too_few_and_too_many_bytes(tmp_path: Path, change: bytes) -> None:
    path = write_model(tmp_path)
    path.write_bytes(path.read_bytes() + change if change else path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors .*the header describes \d+ bytes, the file has"
    ):
        load_model_weights(nn.Linear(2, 2), tmp_path)


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}
    text = json.dumps({"weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors .*weight has the dtype 'F4', which is not supp"
    ):
        load_model_weights(nn.Linear(4, 2), tmp_path)


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """The Hugging Face cache holds nothing but links to its blobs."""
    (tmp_path / "blobs").mkdir()
    write_model(tmp_path / "blobs").rename(tmp_path / "blobs" / "4f2a")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to("../blobs/4f2a")
    model = nn.Linear(2, 2)
    load_model_weights(model, tmp_path / "snapshot")
    assert model.bias.tolist() == [1, 1]
    link.unlink()
    link.symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match="snapshot"):
        load_model_weights(model, tmp_path / "snapshot")


def test_weights_without_memory_are_named(tmp_path: Path, store: Callable[..., Path]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    store(ModelState(model), "model", tmp_path / "m")
    for layer in model:
        layer.weight.untyped_storage().resize_(0)  # Equal shapes without memory are not tied weights.
    for action in (ModelState(model).state_dict, lambda: load_model_weights(model, tmp_path / "m")):
        with pytest.raises(CheckpointError, match=r"^weight 0\.weight has lost its memory"):
            action()
