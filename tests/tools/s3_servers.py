"""Real S3 servers for tests: SeaweedFS honours conditional puts, rclone ignores them."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

from dist_env import ObjectStore

KEY, SECRET = "AKIAWRITER", "secret-of-the-writer"
READER_KEY, READER_SECRET = "AKIAREADER", "secret-of-the-reader"
START_SECONDS = 60.0
_ATTEMPTS = 3
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


def program(name: str) -> str:
    """The path of an installed server."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is not installed; see the dependency group `remote`"
    return found


def start(words: list[str], folder: Path, endpoint: str) -> subprocess.Popen[bytes]:
    """Start a server and wait until it takes an object."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    until = time.monotonic() + START_SECONDS
    settings = Server(endpoint).environment()
    # No other variable is touched: a thread of a test may read them meanwhile.
    before = {name: os.environ.pop(name, None) for name in settings}
    os.environ.update(settings)
    try:
        store = ObjectStore("s3://tests", 1.0)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    while True:
        try:
            store.put("started", b"yes")
            return process
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                end(process)
                raise RuntimeError((folder / "log").read_text()[-3000:]) from error
            time.sleep(0.2)


def restart(process: subprocess.Popen[bytes], server: Server, folder: Path) -> subprocess.Popen[bytes]:
    """Start a server that was ended anew, with what it has stored."""
    return start(list(process.args), folder, server.endpoint)  # type: ignore[arg-type]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server."""
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
    for attempt in range(1, _ATTEMPTS + 1):
        names = ("s3.port", "s3.port.iceberg", "s3.port.lance", "master.port", "volume.port", "filer.port")
        ports = dict(zip(names, _ports_of_weed(len(names)), strict=True))
        words = [program("weed"), "server", "-s3", "-master.telemetry=false", "-ip=127.0.0.1"]
        words += ["-ip.bind=127.0.0.1", f"-dir={folder / 'data'}", f"-s3.config={folder / 'users.json'}"]
        words += [f"-{name}={port}" for name, port in ports.items()] + list(options)
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        try:
            return Server(endpoint), start(words, folder, endpoint)
        except RuntimeError as error:
            # Another program was faster.
            if attempt == _ATTEMPTS or "address already in use" not in str(error):
                raise
    raise AssertionError


def _ports_of_weed(count: int) -> list[int]:
    """Free ports of which each number plus 10,000 is free as well: the server also listens there.

    All are below those that systems give to connections.
    """
    found: list[int] = []
    while len(found) < count:
        low = random.randrange(12_000, 22_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", low))
                two.bind(("127.0.0.1", low + 10_000))
            except OSError:
                continue
        if low not in found:
            found.append(low)
    return found


def start_rclone(folder: Path) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start rclone, with one user."""
    (folder / "data" / "tests").mkdir(parents=True)
    port = free_port()
    words = [program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    endpoint = f"http://127.0.0.1:{port}"
    return Server(endpoint), start([*words, str(folder / "data")], folder, endpoint)
