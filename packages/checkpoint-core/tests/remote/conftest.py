"""Real S3 servers: one that honours conditional puts (SeaweedFS), and one that ignores them (rclone)."""

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from s3_servers import Server, end, start_rclone, start_weed

from checkpoint_core.store_path import StorePath, locate
from dist_env import open_object_store


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that honours conditional puts."""
    server, process = start_weed(tmp_path_factory.mktemp("weed"))
    yield server
    end(process)


@pytest.fixture
def small_weed(tmp_path: Path) -> Iterator[Server]:
    """A server with room for two volumes of 32 MB."""
    (tmp_path / "weed").mkdir()
    options = ("-volume.max=2", "-master.volumeSizeLimitMB=32")
    server, process = start_weed(tmp_path / "weed", *options)
    yield server
    end(process)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that ignores conditions."""
    server, process = start_rclone(tmp_path_factory.mktemp("rclone"))
    yield server
    end(process)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Sets the environment of the stores that this process opens from then on, and ends with its uploads."""

    def apply(environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        open_object_store.cache_clear()

    yield apply
    # One that was given up may open a store when the environment of this test is gone, for the next test.
    uploads = [thread for thread in threading.enumerate() if thread.name.startswith("uploading to ")]
    for thread in uploads:
        thread.join(60)
    open_object_store.cache_clear()
    assert not any(thread.is_alive() for thread in uploads), uploads


@pytest.fixture
def s3(weed: Server, use: Callable[[Mapping[str, str]], None]) -> str:
    """A new place on the server that honours conditional puts."""
    use(weed.environment())
    return f"s3://tests/{uuid.uuid4().hex[:12]}/run"


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new place in each kind of store."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    if request.param == "file":
        return f"file://{tmp_path / 'stored' / 'run'}"
    return f"memory://{uuid.uuid4().hex[:12]}/run"


@pytest.fixture
def keys() -> Callable[[str], list[str]]:
    """Lists the objects below an address, with the random part of a save's directory as `<save>`."""

    def listed(where: str) -> list[str]:
        place = locate(where)
        names = [path.relative_to(place).as_posix() for path in place.rglob("*")]
        return sorted(re.sub(r"(?<=/)[0-9a-f]{8}(?=/)", "<save>", name) for name in names)

    return listed


@pytest.fixture
def place() -> Callable[[str], StorePath]:
    """The place of an address in a store."""

    def at(where: str) -> StorePath:
        found = locate(where)
        assert isinstance(found, StorePath)
        return found

    return at
