"""Addresses of object stores, without a store: what is understood, what is refused, and what is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_core import CheckpointError, CheckpointManager, DirectoryLease, find_lease_holder
from checkpoint_core.cli import main
from checkpoint_core.store_path import StorePath, locate

WITHOUT = """
import sys
sys.modules["obstore"] = None  # As Python marks what cannot be imported.
"""


def run(code: str) -> str:
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_imported_before_a_store_is_used() -> None:
    code = """
import sys
import checkpoint_core
for name in checkpoint_core.__all__:
    getattr(checkpoint_core, name)
from checkpoint_core.store_path import locate
print(locate("s3://bucket/run") / "checkpoint-1", "obstore" in sys.modules)
"""
    assert run(code).split() == ["s3://bucket/run/checkpoint-1", "False"]


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    code = f"""{WITHOUT}
import torch
from checkpoint_core import CheckpointManager, CheckpointError
manager = CheckpointManager("s3://bucket/run", {{"model": torch.nn.Linear(2, 2)}})
for action in (manager.load, lambda: manager.save(1)):
    try:
        action()
    except CheckpointError as error:
        print(error)
manager = CheckpointManager({str(tmp_path / "run")!r}, {{"model": torch.nn.Linear(2, 2)}})
manager.save(1)
"""
    lines = run(code).splitlines()
    assert len(lines) == 2
    assert all("which needs obstore. Install the extra 'remote'" in line for line in lines)
    assert all("checkpoint-core[remote]" in line for line in lines)
    assert (tmp_path / "run" / "checkpoint-1" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("S3://bucket//a/b/", "s3://bucket/a/b"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("az://container/run", "az://container/run"),
        ("file:///data/my%20run", "file:///data/my run"),
        ("memory://name/run", "memory://name/run"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    place = locate(text)
    assert isinstance(place, StorePath)
    assert str(place) == address
    assert place == locate(place)
    assert (place / "x" / "y.json").parent.parent == place
    assert ((place / "y.json").name, (place / "y.json").suffix) == ("y.json", ".json")
    assert (place / "x" / "y").relative_to(place).as_posix() == "x/y"
    assert str((place / "x").with_name("z")) == f"{address}/z"
    # What would write through the file system does not take it for a path of it.
    with pytest.raises(TypeError):
        Path(place)
    with pytest.raises(TypeError):
        open(place)  # noqa: PTH123, SIM115


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://host/run", "addresses that begin with http:// are not supported. Use one of s3://"),
        ("hdfs://host/run", "addresses that begin with hdfs:// are not supported"),
        ("s3://bucket", "is a whole bucket. Name a place in it, such as s3://bucket/run"),
        ("s3:///run", "does not name a bucket"),
        ("file://host/run", "names a host. Write file:///directory"),
        ("s3://bucket/../run", "has a part '.' or '..'"),
        (Path("s3://bucket/run"), "is the Path of an address, which has lost a slash"),
        (Path("/data/s3:/bucket/run"), "is the Path of an address, which has lost a slash"),
    ],
)
def test_what_is_not_an_address(text: str | Path, message: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        CheckpointManager(text, {})
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["s3://me:secret@bucket/run", "az://container/run?sv=1&sig=secret"])
def test_credentials_in_an_address_are_refused_and_not_repeated(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="they come from the environment") as raised:
        locate(text)
    assert "secret" not in str(raised.value)
    with pytest.raises(SystemExit):
        main(["ls", text])
    told = capsys.readouterr()
    assert "they come from the environment" in told.err
    assert "secret" not in told.err


def test_what_needs_a_directory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for action in (DirectoryLease, find_lease_holder):
        with pytest.raises(
            CheckpointError, match="needs a directory, but s3://bucket/run is in an object store"
        ):
            action("s3://bucket/run")
    with pytest.raises(SystemExit):
        main(["export", "s3://bucket/run/checkpoint-1", "s3://bucket/out"])
    assert "a directory is needed" in capsys.readouterr().err
