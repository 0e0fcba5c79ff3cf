"""Start Python scripts in processes that have imported torch already.

A process takes more than a second of a core to import torch, and tests of several ranks start hundreds. A
process that has imported it, and has no threads yet, forks one for each script instead. A script sees what it
would see otherwise: its own arguments, environment, standard streams and `__main__`; only what happens while
torch is imported has happened before, and at its end modules are not taken apart.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ports import free_port

_SERVER = Path(__file__).with_name("warm_server.py")


class WarmStart:
    """Forks scripts from a process of its own.

    Args:
        modules: What that process imports; it may start no threads.
        env: Its environment; variables that are read while modules are imported must be in it.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-W", "ignore", str(_SERVER), str(theirs.fileno()), *modules]
        self._server = subprocess.Popen(command, env=dict(env), pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        self._read = b""
        self._codes: dict[int, int] = {}

    def start(self, words: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> WarmProcess:
        """Start a script.

        Args:
            words: The script, or `-m` and a module, and its arguments.
            env: Its environment.
            out: File for what it writes to standard output.
            err: File for what it writes to standard error.
        """
        # Who reads them need not wait until they are there, and finds nothing of a script before.
        for path in (out, err):
            path.write_bytes(b"")
        job = {"words": list(words), "env": dict(env), "out": str(out), "err": str(err)}
        self._socket.sendall(json.dumps({**job, "folder": str(Path.cwd())}).encode() + b"\n")
        while "started" not in (message := self._next(None)):
            pass
        return WarmProcess(self, message["started"])

    def code_of(self, process: int, deadline: float | None) -> int | None:
        """The exit code of a process, negative for a signal; None if it has none at a time of `monotonic`."""
        while process not in self._codes:
            if not self._next(deadline):
                return None
        return self._codes[process]

    def close(self) -> None:
        """End what still runs, and the process that forks."""
        # Processes that a test has forked may have the socket too: closing it here would not end it.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._server.wait()

    def _next(self, deadline: float | None) -> dict[str, int]:
        """The next message; none if there is none until a time of `monotonic`."""
        while b"\n" not in self._read:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return {}
            received = self._socket.recv(65536)
            if not received:
                raise RuntimeError("the process that starts scripts has ended")
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


def run_ranks(
    count: int, words: Sequence[str], modules: Sequence[str], folder: Path, timeout: float = 300.0
) -> None:
    """Run a script on ranks with the variables of torchrun, and fail with what they said if one fails.

    Args:
        count: How many ranks.
        words: The script and its arguments.
        modules: What the process that forks them imports.
        folder: Where `out-<rank>` and `err-<rank>` are written.
        timeout: Seconds that each may take.
    """
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environ = os.environ | job | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    warm = WarmStart(modules, environ)
    try:
        ranks = [
            warm.start(
                words,
                environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / f"out-{rank}",
                folder / f"err-{rank}",
            )
            for rank in range(count)
        ]
        codes = [rank.wait(timeout) for rank in ranks]
    finally:
        warm.close()
    said = "".join((folder / f"err-{rank}").read_text() for rank in range(count))
    assert codes == [0] * count, said


class WarmProcess:
    """A script that was started; as much of `subprocess.Popen` as tests need."""

    def __init__(self, start: WarmStart, pid: int) -> None:
        self._start = start
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._start.code_of(self.pid, time.monotonic())

    def wait(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: If it does not end in so many seconds.
        """
        code = self._start.code_of(self.pid, time.monotonic() + timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)
