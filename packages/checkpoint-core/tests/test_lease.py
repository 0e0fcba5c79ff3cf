"""One owner of a directory at a time: real processes that take it together, die, are suspended, wake up."""

import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from checkpoint_core import (
    CheckpointError,
    DirectoryLease,
    LeaseHeldError,
    LeaseLostError,
    find_lease_holder,
)
from checkpoint_core import lease as protocol
from checkpoint_core.lease import read_leases

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "1"))
LIMIT_S = 60
# Nothing of torch runs in the children, so that forking is safe, and saves its import.
_fork = multiprocessing.get_context("fork")


class Owner:
    """A process that takes the lease of a directory, and then does what it is told.

    Args:
        directory: The directory.
        host: What the process takes its host's name to be; the name is part of what tells machines apart.
        times: Heartbeat and takeover time.
    """

    def __init__(self, directory: Path, *, host: str | None = None, **times: float) -> None:
        self.ours, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_own, args=(directory, host, times, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hears(self) -> str:
        assert self.ours.poll(LIMIT_S)
        return str(self.ours.recv())

    def asked(self, word: str) -> str:
        self.ours.send(word)
        return self.hears()

    def killed(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def pid(self) -> int:
        return int(str(self.process.pid))


def _own(directory: Path, host: str | None, times: dict[str, float], pipe: Connection) -> None:
    if host is not None:
        socket.gethostname = lambda: host
    lease = DirectoryLease(directory, **times)
    pipe.send(_outcome(lease.acquire))
    while True:
        word = pipe.recv()
        pipe.send(_outcome(getattr(lease, word)))


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    started: list[Owner] = []

    def start(directory: Path = tmp_path, **options: object) -> Owner:
        started.append(Owner(directory, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.killed()


def test_a_second_run_is_refused_and_told_who_holds_it(tmp_path: Path, owner: Callable[..., Owner]) -> None:
    first = owner()
    assert first.hears() == "done"
    started = time.monotonic()
    with pytest.raises(LeaseHeldError) as caught:
        DirectoryLease(tmp_path).acquire()
    assert time.monotonic() - started < 30  # no look at heartbeats, for which it takes 60 s
    assert f"{tmp_path} is in use by process {first.pid} on {socket.gethostname()}, since" in str(
        caught.value
    )
    holder = find_lease_holder(tmp_path)
    assert holder is not None
    assert (holder.pid, holder.is_here(), holder.has_ended()) == (first.pid, True, False)
    assert first.asked("release") == "done"
    assert find_lease_holder(tmp_path) is None
    with DirectoryLease(tmp_path) as lease:
        lease.check()
        with pytest.raises(LeaseHeldError, match=f"process {os.getpid()}"):
            DirectoryLease(tmp_path).acquire()
        assert lease.acquire() is lease
    assert not list(tmp_path.iterdir())
    with pytest.raises(LeaseLostError, match="is not leased"):
        lease.check()


def test_a_link_to_the_directory_is_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with DirectoryLease(tmp_path / "run"), pytest.raises(LeaseHeldError):
        DirectoryLease(tmp_path / "link").acquire()


def test_a_killed_holder_of_this_machine_is_replaced_at_once(
    tmp_path: Path, owner: Callable[..., Owner], caplog: pytest.LogCaptureFixture
) -> None:
    first = owner()
    assert first.hears() == "done"
    first.killed()
    started = time.monotonic()
    with DirectoryLease(tmp_path) as lease:
        assert time.monotonic() - started < 30  # no look at heartbeats, for which it takes 60 s
        lease.check()
    assert f"taken over from process {first.pid}" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_living_run_of_another_machine_is_refused_at_its_next_heartbeat(
    tmp_path: Path, owner: Callable[..., Owner]
) -> None:
    first = owner(host="node-7", heartbeat_seconds=0.2, takeover_seconds=30.0)
    assert first.hears() == "done"
    started = time.monotonic()
    with pytest.raises(LeaseHeldError, match=f"process {first.pid} on node-7"):
        DirectoryLease(tmp_path).acquire()
    assert time.monotonic() - started < 25  # and not after the 30 s


def test_a_run_of_another_machine_that_gives_no_sign_is_replaced_after_its_time(
    tmp_path: Path, owner: Callable[..., Owner], caplog: pytest.LogCaptureFixture
) -> None:
    """It is only suspended: when it wakes up it must notice before it writes."""
    first = owner(host="node-7", heartbeat_seconds=0.2, takeover_seconds=1.5)
    assert first.hears() == "done"
    os.kill(first.pid, signal.SIGSTOP)
    started = time.monotonic()
    # The time of this process does not count: the holder has promised another one.
    with DirectoryLease(tmp_path, takeover_seconds=600.0) as lease:
        assert 1.4 < time.monotonic() - started < 60
        os.kill(first.pid, signal.SIGCONT)
        told = first.asked("check")
        assert told.startswith(f"LeaseLostError: {tmp_path} is no longer this run's own")
        assert f"process {os.getpid()} on {socket.gethostname()}" in told
        assert first.asked("release") == "done"
        lease.check()
    assert "is held by process" in caplog.text
    assert "it is taken over in 2 s" in caplog.text or "it is taken over in 1 s" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[" * 3000, b'{"pid": 1}\n000000000001\n', b"\x00\xff"])
def test_a_lease_that_tells_nothing_is_replaced_after_a_time(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lease-41").write_bytes(content)
    assert find_lease_holder(tmp_path) is None
    started = time.monotonic()
    with DirectoryLease(tmp_path, heartbeat_seconds=0.05, takeover_seconds=0.3):
        assert time.monotonic() - started >= 0.3
        assert [found.number for found in read_leases(tmp_path)] == [42]


def test_several_dead_leases_are_all_looked_at(tmp_path: Path, owner: Callable[..., Owner]) -> None:
    """One that died while it took over leaves its own beside that of a holder that may have woken up."""
    first = owner()
    assert first.hears() == "done"
    text = (tmp_path / ".lease-1").read_text().replace(f'"pid": {first.pid}', '"pid": 4194399')
    (tmp_path / ".lease-2").write_text(text)
    with pytest.raises(LeaseHeldError, match=f"process {first.pid}"):
        DirectoryLease(tmp_path).acquire()
    first.killed()
    with DirectoryLease(tmp_path):
        assert [found.number for found in read_leases(tmp_path)] == [3]


def test_who_listed_long_ago_makes_way(
    tmp_path: Path, owner: Callable[..., Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and making `.lease-1`, one run has come and died, and the next owns `.lease-2`."""
    create = protocol.create_lease
    came: list[Owner] = []

    def late(path: Path, takeover_seconds: float) -> bytes | None:
        monkeypatch.undo()
        for _ in range(2):
            came.append(owner())
            assert came[-1].hears() == "done"
            if len(came) == 1:
                came[0].killed()
        assert path.name == ".lease-1"
        return create(path, takeover_seconds)

    monkeypatch.setattr(protocol, "create_lease", late)
    with pytest.raises(LeaseHeldError) as caught:
        DirectoryLease(tmp_path).acquire()
    assert caught.value.holder.pid == came[1].pid
    assert came[1].asked("check") == "done"
    assert [found.path.name for found in read_leases(tmp_path)] == [".lease-2"]


def test_a_removed_lease_is_noticed(tmp_path: Path) -> None:
    lease = DirectoryLease(tmp_path / "new" / "run").acquire()
    (lease.directory / ".lease-1").unlink()
    with pytest.raises(LeaseLostError, match=r"\.lease-1 was taken over or removed; nobody has it now"):
        lease.check()
    with DirectoryLease(lease.directory) as other:
        lease.release()
        other.check()
        with pytest.raises(LeaseLostError):
            lease.check()


def test_what_is_dropped_or_forked_does_no_harm(tmp_path: Path) -> None:
    lease = DirectoryLease(tmp_path / "run").acquire()
    child = os.fork()
    if child == 0:
        held = lease.held
        lease.release()
        os._exit(int(held))
    assert os.waitpid(child, 0)[1] == 0
    lease.check()
    del lease
    gc.collect()
    # The directory was made for the lease.
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot take the lease of .*file/run"):
        DirectoryLease(tmp_path / "file" / "run").acquire()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        told = _outcome(DirectoryLease(tmp_path / "full").acquire)
        left = list((tmp_path / "full").iterdir())
        os._exit(0 if "no space left to write" in told and ".lease-1" in told and not left else 1)
    assert os.waitpid(child, 0)[1] == 0
    for times in ((0.0, 60.0), (30.0, 60.0), (float("nan"), 60.0)):
        with pytest.raises(CheckpointError, match="heartbeat_seconds"):
            DirectoryLease(tmp_path, heartbeat_seconds=times[0], takeover_seconds=times[1])


def test_of_many_that_come_at_once_one_owns_the_directory(tmp_path: Path) -> None:
    """Random pauses between the steps of the protocol, owners that end, are killed, and come again."""
    processes = 5
    seeds = [random.randrange(2**32) for _ in range(processes)]
    running = [
        _fork.Process(target=_struggle, args=(tmp_path, seed, 12 * EXAMPLES), daemon=True) for seed in seeds
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(LIMIT_S * EXAMPLES)
    assert [process.exitcode for process in running] == [0] * processes, seeds
    times = [len(path.read_text()) for path in (tmp_path / "counts").iterdir()]
    assert sum(times) > 0


def _struggle(place: Path, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    slowly = draw.random() < 0.7

    def pausing(function: Callable[..., object]) -> Callable[..., object]:
        def paused(*args: object) -> object:
            result = function(*args)
            if slowly and draw.random() < 0.3:
                time.sleep(draw.choice((0.002, 0.02, 0.1)))
            return result

        return paused

    protocol.create_lease = pausing(protocol.create_lease)  # type: ignore[assignment]
    protocol.read_leases = pausing(protocol.read_leases)  # type: ignore[assignment]
    (place / "counts").mkdir(exist_ok=True)
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            os._exit(_struggle_once(place, draw))
        draw.random()
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) not in (0, -signal.SIGKILL):
            sys.exit(1)


def _struggle_once(place: Path, draw: random.Random) -> int:
    lease = DirectoryLease(place / "run")
    try:
        lease.acquire()
    except LeaseHeldError:
        return 0
    # Who finds another living process in here has found two owners.
    mark = place / "inside" / str(os.getpid())
    mark.parent.mkdir(exist_ok=True)
    mark.write_text("")
    for other in mark.parent.iterdir():
        if other != mark and Path("/proc", other.name).exists() and "Z" not in _state(other.name):
            return 1
    time.sleep(draw.uniform(0, 0.01))
    lease.check()
    with (place / "counts" / str(os.getpid())).open("a") as file:
        file.write(".")
    mark.unlink()
    if draw.random() < 0.4:
        os.kill(os.getpid(), signal.SIGKILL)
    lease.release()
    return 0


def _state(pid: str) -> str:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
