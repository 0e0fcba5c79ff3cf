"""The service by which nodes ask one another, in one process: it gives nothing to those who may not ask."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.errors import CheckpointError
from checkpoint_core.peers import PeerError, PeerPath, Peers
from checkpoint_core.store_path import RangeReader
from checkpoint_core.tensor_files import TensorFileReader
from dist_env import StaticDistributedEnvironment


class Tasks:
    """What this rank does when it is asked."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.given_up = threading.Event()

    def double(self, request: dict[str, Any], check_waited_for: Any) -> dict[str, object]:
        return {"number": 2 * request["number"]}

    def fail(self, request: dict[str, Any], check_waited_for: Any) -> dict[str, object]:
        raise CheckpointError("the disk is gone.")

    def last(self, request: dict[str, Any], check_waited_for: Any) -> dict[str, object]:
        self.begun.set()
        until = time.monotonic() + 60
        try:
            while time.monotonic() < until:
                check_waited_for()
                time.sleep(0.01)
        finally:
            self.given_up.set()
        return {}


@pytest.fixture
def tasks() -> Tasks:
    return Tasks()


@pytest.fixture
def peers(tasks: Tasks) -> Iterator[Peers]:
    known = {"double": tasks.double, "fail": tasks.fail, "last": tasks.last}
    found = Peers(RankAgreement(StaticDistributedEnvironment(), 10.0), "testing", 10.0, known)
    yield found
    found.close()


def address(peers: Peers) -> tuple[str, int]:
    host, port = peers._service.server_address[:2]
    return str(host), int(port)


def test_files_that_are_shared(peers: Peers, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.bin").write_bytes(bytes(range(200)))
    (tmp_path / "b.bin").write_bytes(b"not shared")
    peers.share(tmp_path, ["deep/a.bin"])
    path = PeerPath.on(peers.main, tmp_path, "deep/a.bin", 200)
    assert path.read_bytes() == bytes(range(200))
    assert (path.name, path.suffix, path.is_file(), path.stat().st_size) == ("a.bin", ".bin", True, 200)
    first, second = bytearray(3), bytearray(5)
    assert RangeReader(path).fill([(7, memoryview(first)), (100, memoryview(second))]) == 8
    assert (bytes(first), bytes(second)) == (bytes(range(7, 10)), bytes(range(100, 105)))
    assert str(path).startswith(f"{tmp_path} of rank 0 on ")
    for name in ("b.bin", "../deep/a.bin", "/etc/hostname"):
        with pytest.raises(PeerError, match=r"rank 0 on .*is not shared"):
            peers.main.read(name, [0], [1])
    with pytest.raises(PeerError, match="it ended while it was being read"):
        peers.main.read("deep/a.bin", [190], [20])
    (tmp_path / "deep" / "a.bin").unlink()
    with pytest.raises(PeerError, match="No such file"):
        path.read_bytes()


def test_a_file_of_tensors(peers: Peers, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    values = torch.arange(2_000_000, dtype=torch.float32)
    save_file({"values": values}, tmp_path / "a.safetensors")
    peers.share(tmp_path, ["a.safetensors"])
    size = (tmp_path / "a.safetensors").stat().st_size
    with TensorFileReader(PeerPath.on(peers.main, tmp_path, "a.safetensors", size)) as reader:
        assert torch.equal(reader.read("values"), values)


def test_whoever_does_not_know_the_token_gets_nothing(peers: Peers, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"weights")
    peers.share(tmp_path, ["a.bin"])
    for headers in ({}, {"Authorization": "guess"}):
        connection = HTTPConnection(*address(peers), timeout=10)
        connection.request("POST", "/read", '{"file": "a.bin", "starts": [0], "lengths": [7]}', headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (403, b"the token is wrong")
    # Nor does it keep others from asking.
    with socket.create_connection(address(peers)) as silent, socket.create_connection(address(peers)) as odd:
        odd.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
        assert peers.main.read("a.bin", [0], [7]) == b"weights"
        del silent


def test_tasks(peers: Peers, tasks: Tasks) -> None:
    assert peers.main.run("double", {"number": 4}) == {"number": 8}
    with pytest.raises(PeerError, match=r"rank 0 on .*: the disk is gone"):
        peers.main.run("fail", {})
    task = peers.main.begin("last", {})
    assert tasks.begun.wait(10)
    assert task.poll(0.0) is None
    # Who is told to stop says so, and only then does nothing more come of it.
    assert task.stop(10.0)
    assert tasks.given_up.is_set()


def test_a_task_whose_asker_is_gone(peers: Peers, tasks: Tasks) -> None:
    task = peers.main.begin("last", {})
    assert tasks.begun.wait(10)
    task._connection.close()
    assert tasks.given_up.wait(10)


def test_a_host_that_falls_silent_is_noticed(peers: Peers) -> None:
    task = peers.main.begin("last", {})
    connection = task._connection.sock
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
    assert task.stop(10.0)


def test_a_large_file_over_a_slow_network(
    peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint_core.peers._Handler.timeout", 1.0)
    size = 24 * 1024 * 1024
    (tmp_path / "a.bin").write_bytes(bytes(size))
    peers.share(tmp_path, ["a.bin"])
    connection = HTTPConnection(*address(peers), timeout=10)
    headers = {"Authorization": peers.main._token}
    connection.request(
        "POST", "/read", json.dumps({"file": "a.bin", "starts": [0], "lengths": [size]}), headers
    )
    # Longer than the time limit of one write, which is not that of the whole answer.
    answer, received = connection.getresponse(), 0
    for _ in range(30):
        received += len(answer.read(256 * 1024))
        time.sleep(0.05)
    received += len(answer.read())
    assert received == size


def test_a_rank_that_is_gone(tasks: Tasks) -> None:
    peers = Peers(
        RankAgreement(StaticDistributedEnvironment(), 10.0), "testing", 10.0, {"double": tasks.double}
    )
    peers.main.run("double", {"number": 1})
    peers.close()
    with pytest.raises(PeerError, match=r"rank 0 on .* does not answer"):
        peers.main.run("double", {"number": 1})
