"""Real S3 servers: one that honours conditional puts (SeaweedFS), and one that ignores them (rclone)."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoint_core.object_store import open_store
from checkpoint_core.store_path import StorePath, locate

KEY, SECRET = "AKIAWRITER", "secret-of-the-writer"
READER_KEY, READER_SECRET = "AKIAREADER", "secret-of-the-reader"
START_SECONDS = 60.0
_ACTIONS = {"writer": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"]}


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    endpoint: str

    def environment(self, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is not installed; see the dependency group `remote`"
    return found


def start(words: list[str], folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    """Start a server and wait until it lists an empty place."""
    log = (folder / "log").open("wb")
    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    until = time.monotonic() + START_SECONDS
    for name, value in Server(endpoint).environment().items():
        os.environ[name] = value
    while True:
        open_store.cache_clear()
        try:
            open_store("s3://tests", 1.0).put("started", b"yes")
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise RuntimeError((folder / "log").read_text()[-3000:]) from error
            time.sleep(0.2)
        else:
            open_store.cache_clear()
            return process


def _end(process: subprocess.Popen[bytes]) -> None:
    # Asked politely, a server with volumes that are full waits for them for a minute.
    process.kill()
    process.wait(30)


def start_weed(folder: Path, *options: str) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start SeaweedFS with two users, of which one may only read."""
    users = [
        {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": _ACTIONS[name],
        }
        for name, key, secret in (("writer", KEY, SECRET), ("reader", READER_KEY, READER_SECRET))
    ]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    (folder / "data").mkdir(exist_ok=True)
    # Each also listens on its number plus 10,000, so the numbers are taken below that.
    names = ("s3.port", "s3.port.iceberg", "s3.port.lance", "master.port", "volume.port", "filer.port")
    ports: dict[str, int] = {}
    while len(ports) < len(names):
        (port,) = free_ports(1)
        low = 20_000 + port % 20_000
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", low))
                two.bind(("127.0.0.1", low + 10_000))
            except OSError:
                continue
        if low not in ports.values() and low + 10_000 not in ports.values():
            ports[names[len(ports)]] = low
    words = [program("weed"), "server", "-s3", "-master.telemetry=false", "-ip=127.0.0.1"]
    words += ["-ip.bind=127.0.0.1", f"-dir={folder / 'data'}", f"-s3.config={folder / 'users.json'}"]
    words += [f"-{name}={port}" for name, port in ports.items()] + list(options)
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    return Server(endpoint), start(words, folder, endpoint)


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that honours conditional puts."""
    server, process = start_weed(tmp_path_factory.mktemp("weed"))
    yield server
    _end(process)


@pytest.fixture
def small_weed(tmp_path: Path) -> Iterator[Server]:
    """A server with room for two volumes of 32 MB."""
    (tmp_path / "weed").mkdir()
    options = ("-volume.max=2", "-master.volumeSizeLimitMB=32")
    server, process = start_weed(tmp_path / "weed", *options)
    yield server
    _end(process)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that ignores conditions."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / "tests").mkdir(parents=True)
    (port,) = free_ports(1)
    words = [program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    endpoint = f"http://127.0.0.1:{port}"
    process = start([*words, str(folder / "data")], folder, endpoint)
    yield Server(endpoint)
    _end(process)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Sets the environment of the stores that this process opens from then on."""

    def apply(environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        open_store.cache_clear()

    yield apply
    open_store.cache_clear()


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
