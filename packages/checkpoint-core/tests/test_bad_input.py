"""Bad input when loading: damage of every kind, planted pickles, links, and objects that do not fit."""

import json
import logging
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointError,
    find_latest_checkpoint,
    load_model_weights,
)
from checkpoint_core.files import checksum_file
from checkpoint_core.manifest import _digest, read_manifest, verify_checkpoint

FILES = [
    "eval_metrics.json",
    "model.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "rng.rank0.json",
    "rng.rank0.safetensors",
    "scheduler.json",
    "trainer.json",
]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    """A bomb that is known to work, and that nothing in the test may set off."""
    mark = tmp_path / "exploded"
    found = Bomb(mark)
    pickle.loads(pickle.dumps(found))
    assert mark.exists()
    mark.unlink()
    yield found
    assert not mark.exists()


def look(job: object) -> str:
    """Everything that a load could change, as text."""
    model, optimizer, scheduler = job.model, job.optimizer, job.scheduler  # type: ignore[attr-defined]
    counter = job.counter.value  # type: ignore[attr-defined]
    states = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), counter]
    return repr([*states, torch.get_rng_state().tolist()])


def load_fails(job: object, path: Path, *parts: str) -> None:
    """A load by name raises an error with all the parts, and changes no object."""
    before = look(job)
    with pytest.raises(CheckpointError) as caught:
        job.manager.load_checkpoint(path)  # type: ignore[attr-defined]
    for part in parts:
        assert part in str(caught.value)
    assert look(job) == before


@pytest.fixture
def saved(job: Callable[..., object], tmp_path: Path) -> Path:
    """Two checkpoints of a job; returns the newer one."""
    first = job(save_total_limit=None)
    for step in (1, 2):
        first.train(1)
        path = first.manager.save_checkpoint(step, metrics={"eval_loss": 1.0})
    return path


def rewrite(path: Path, **changes: object) -> None:
    """Change the manifest as somebody would who knows the format."""
    document = {**json.loads((path / "manifest.json").read_text()), **changes}
    document.pop("checksum")
    (path / "manifest.json").write_text(json.dumps({**document, "checksum": _digest(document)}))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file of a checkpoint, and make the manifest agree."""
    path.write_bytes(content)
    record = checksum_file(path)
    files = json.loads((path.parent / "manifest.json").read_text())["files"]
    rewrite(path.parent, files={**files, path.name: {"size": record.size, "checksum": record.checksum}})


def test_the_files_are_those_that_are_damaged_below(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == sorted([*FILES, "manifest.json"])


@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_file(job, saved: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A flipped byte anywhere, a byte too few, a byte too many: named; else passed over."""
    other = job(seed=7)
    path = saved / name
    content = path.read_bytes()
    # For safetensors: length of the header, header, first and last byte of the data.
    header = 8 + int.from_bytes(content[:8], "little") if name.endswith("safetensors") else 1
    for place in {0, 12, header - 1, header, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        load_fails(
            other, saved, f"{path} is damaged: its content does not match its checksum", "Restore the file"
        )
    for damaged in (content[:-1], content[: len(content) // 2], b"", content + b"\0", content + content):
        path.write_bytes(damaged)
        size = f"{len(damaged)} bytes, but {len(content)} were written"
        load_fails(other, saved, f"{path} is damaged: it has {size}", "Restore the file")
    path.write_bytes(content[:-1] + b"\xff")
    with caplog.at_level(logging.WARNING):
        assert find_latest_checkpoint(saved.parent, verify_checksums=True) == saved.parent / "checkpoint-1"
        assert other.manager.load_checkpoint().step == 1
    assert caplog.text.count(f"passing over checkpoint-2: {path} is damaged") == 1
    assert f"passing over checkpoint-2: choosing a checkpoint: {path} is damaged" in caplog.text
    path.write_bytes(content)
    assert other.manager.load_checkpoint(saved).step == 2


def test_every_byte_of_the_manifest(job, saved: Path) -> None:
    """No flip changes what is read: it is an error, or it only touches white space."""
    path = saved / "manifest.json"
    content = path.read_bytes()
    whole = read_manifest(saved)
    harmless = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            assert read_manifest(saved) == whole
            harmless += 1
            assert content[place : place + 1].isspace()
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 - it is not raised for every byte
    assert harmless < len(content) // 20
    for damaged in (b"", content[:-3], content + b"}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(damaged)
        load_fails(job(), saved, str(path), "estore")
    assert find_latest_checkpoint(saved.parent) == saved.parent / "checkpoint-1"


MANIFESTS = {
    "newer schema": ({"schema_version": 3}, ["schema version 3", "reads up to 2", "Upgrade checkpoint-core"]),
    "schema is text": ({"schema_version": "1"}, ["schema_version is '1', not an integer"]),
    "step is text": ({"step": "2"}, ["step is '2', not an integer"]),
    "step is true": ({"step": True}, ["step is True, not an integer"]),
    "other checksums": ({"checksum_algorithm": "md5"}, ["checksum_algorithm is 'md5', not 'crc32c'"]),
    "unknown entry": ({"pickle": "x"}, ["it has the unknown entry 'pickle'"]),
    "no table": ({"files": []}, ["malformed"]),
    "size is text": ({"files": {"a": {"size": "x", "checksum": ""}}}, ["malformed"]),
    "unlisted file": (
        {
            "components": [
                {
                    "key": "trainer",
                    "pattern": "global",
                    "format": "state",
                    "parts": [{"writer": 0, "files": ["../x"]}],
                }
            ]
        },
        ["trainer names files that the file table does not have"],
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_are_not_ours(job, saved: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    changes, parts = MANIFESTS[case]
    rewrite(saved, **changes)
    load_fails(job(), saved, str(saved / "manifest.json"), *parts)
    with caplog.at_level(logging.WARNING):
        assert job().manager.load_checkpoint().step == 1
    assert f"passing over checkpoint-2: {saved / 'manifest.json'}" in caplog.text


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..", "a\\b", "a\0b", ""])
def test_file_names_do_not_leave_the_directory(job, saved: Path, name: str) -> None:
    record = {"size": 1, "checksum": "00000000"}
    parts = [{"writer": 0, "files": [name]}]
    component = {"key": "trainer", "pattern": "global", "format": "state", "parts": parts}
    rewrite(saved, files={name: record}, components=[component])
    load_fails(
        job(), saved, "manifest.json is malformed", "points outside the checkpoint", "Restore the file"
    )


def test_not_a_number_in_a_manifest(saved: Path) -> None:
    """Python reads what strict JSON does not have; such a manifest is passed over like any damaged one."""
    path = saved / "manifest.json"
    path.write_text(path.read_text().rstrip()[:-1] + ', "x": NaN}')
    assert find_latest_checkpoint(saved.parent) == saved.parent / "checkpoint-1"


@contextmanager
def audited() -> Iterator[list[tuple[str, str]]]:
    """What Python opens and unpickles meanwhile: names of events with their first argument."""
    events: list[tuple[str, str]] = []
    active = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if active and event in ("open", "pickle.find_class"):
            events.append((event, str(arguments[0])))

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        active.clear()  # A hook cannot be taken away.


def test_pickles_beside_the_files_are_not_even_opened(job, saved: Path, bomb: Bomb) -> None:
    planted = ["optimizer.pt", "pytorch_model.bin", "rng.pkl", "trainer.json.pkl", "model.pth"]
    for name in planted:
        (saved / name).write_bytes(pickle.dumps(bomb))
    torch.save(bomb, saved / "checkpoint.pt")
    other = job(seed=3)
    with audited() as events:
        loaded = other.manager.load_checkpoint()
        load_model_weights(other.model, saved)
        assert find_latest_checkpoint(saved.parent, verify_checksums=True) == saved
    assert (loaded.step, loaded.missing) == (2, ())
    assert {event for event, _ in events} == {"open"}
    opened = {Path(path).name for _, path in events}
    assert not opened & {*planted, "checkpoint.pt"}
    assert opened >= {*FILES, "manifest.json"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "optimizer.json", "trainer.json"]
)
@pytest.mark.parametrize("kind", ["pickle", "old pickle", "torch.save", "old torch.save"])
def test_pickles_in_place_of_a_file(job, saved: Path, bomb: Bomb, name: str, kind: str) -> None:
    """By their size, and also where somebody has made the manifest agree."""
    path = saved / name
    if "torch" in kind:
        torch.save(bomb, path, _use_new_zipfile_serialization=kind == "torch.save")
        assert zipfile.is_zipfile(path) == (kind == "torch.save")
    else:
        path.write_bytes(pickle.dumps(bomb, protocol=0 if kind == "old pickle" else None))
    load_fails(job(), saved, f"{path} is damaged", "were written")
    replace_file(path, path.read_bytes())
    verify_checkpoint(saved, checksums=True)
    reason = "is not valid JSON" if name.endswith("json") else "safetensors"
    load_fails(job(), saved, f"{path} is", reason)
    if name == "model.safetensors":
        with pytest.raises(CheckpointError, match=r"model\.safetensors is (a pickle|not a readable)"):
            load_model_weights(nn.Linear(2, 2), saved)


def test_links(job, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link to the right content is as good as the file; one to nowhere is a missing file."""
    moved = tmp_path / "elsewhere.safetensors"
    (saved / "model.safetensors").rename(moved)
    (saved / "model.safetensors").symlink_to(moved)
    assert job().manager.load_checkpoint().step == 2
    content = moved.read_bytes()
    moved.write_bytes(content[:-1] + b"\xff")
    load_fails(job(), saved, f"{saved / 'model.safetensors'} is damaged")
    moved.unlink()
    load_fails(
        job(),
        saved,
        "the required component 'model' cannot be loaded",
        "model.safetensors",
        "Restore its files",
    )
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").write_bytes(content)
    (saved / "trainer.json").unlink()
    (saved / "trainer.json").symlink_to("trainer.json")
    load_fails(job(), saved, "trainer.json")


def test_nothing_outside_is_deleted_or_written_through_a_link(job, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("mine")
    first = job(save_total_limit=1)
    path = first.manager.save_checkpoint(1)
    (path / "link").symlink_to(outside)
    (path / "trainer.json").rename(outside / "trainer.json")
    (path / "trainer.json").symlink_to(outside / "trainer.json")
    (path.parent / "checkpoint-2").symlink_to(outside)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2 exists and is not a committed checkpoint .* Move it away"
    ):
        first.manager.save_checkpoint(2)
    first.manager.save_checkpoint(3)
    assert sorted(found.name for found in path.parent.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert sorted(found.name for found in outside.iterdir()) == ["precious.txt", "trainer.json"]


def test_a_link_to_a_checkpoint_is_one(job, saved: Path, tmp_path: Path) -> None:
    shutil.move(saved, tmp_path / "big disk")
    saved.symlink_to(tmp_path / "big disk")
    assert job().manager.load_checkpoint().step == 2


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ({"value": {"$": "object", "class": "os.system"}}, "the unknown kind 'object'"),
        ({"value": {"$": "tensor", "name": "absent"}}, "refers to tensor absent"),
        ([1], "not a dict"),
    ],
)
def test_documents_that_are_not_ours(job, saved: Path, document: object, part: str) -> None:
    """Somebody made the manifest agree, so only the content tells."""
    for name in ("scheduler", "trainer"):
        content = (saved / f"{name}.json").read_bytes()
        replace_file(saved / f"{name}.json", json.dumps(document).encode())
        load_fails(job(), saved, f"component '{name}'", part)
        replace_file(saved / f"{name}.json", content)
