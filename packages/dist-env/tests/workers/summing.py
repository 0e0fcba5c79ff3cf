"""Four ranks in a tree of three floors add numbers; then they part in the way that the argument names."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import dist_env.tree_sums
from dist_env import DistributedEnvironment, HostSums, RankFailedError, gather_objects, naming_lost_ranks

dist_env.tree_sums._FAN_OUT = 2  # 0 above 1 and 2, and 1 above 3
notes: dict[str, object] = {}


def add(env: DistributedEnvironment, sums: HostSums) -> None:
    notes["ones"] = sums.sum([1.0, float(env.rank), 2.0**53 if env.rank == 3 else 0.0])
    notes["many"] = sums.sum([float(env.rank == place % 4) for place in range(5000)]) == [1.0] * 5000
    unlike = sums.sum([0.1 * (env.rank + 1), 1e16, -1e16, 1 / 3])
    notes["same bits"] = len({tuple(each) for each in gather_objects(unlike, env)}) == 1
    notes["not a number"] = str(sums.sum([float("nan") if env.rank == 2 else 1.0]))
    second = HostSums(env, timeout=20)
    notes["two at once"] = second.sum([1.0]) + sums.sum([2.0])
    second.close()
    begin = time.perf_counter()
    for _ in range(500):
        sums.sum([1.0])
    notes["seconds"] = time.perf_counter() - begin


def part(env: DistributedEnvironment, sums: HostSums, how: str) -> None:
    begin = time.monotonic()
    try:
        with naming_lost_ranks(env, "adding", seconds=3):
            if env.rank == 3 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if env.rank == 3 and how == "late":
                time.sleep(4)
            sums.sum([1.0] * (2 if env.rank == 3 and how == "unlike" else 1))
    except (RankFailedError, RuntimeError) as error:
        notes["error"] = f"{type(error).__name__}: {error}"
    notes["waited"] = time.monotonic() - begin


class Stranger:
    """Connects to whatever listens in this process, and says something else than expected."""

    def __init__(self) -> None:
        self._create = socket.create_server

    def __call__(self, *args: object, **options: object) -> socket.socket:
        listener = self._create(*args, **options)  # type: ignore[arg-type]
        self.connection = socket.create_connection(listener.getsockname()[:2])
        self.connection.sendall(b"let me in, please!!!")
        # And others that say nothing, or not all of it, for as long as they are let.
        self.silent = [socket.create_connection(listener.getsockname()[:2]) for _ in range(8)]
        self.silent[0].sendall(b"let me")
        self.silent[1].close()
        return listener


with DistributedEnvironment() as env:
    if env.rank == 0:
        socket.create_server = Stranger()  # type: ignore[assignment]
    how = sys.argv[1]
    sums = HostSums(env, timeout=2.0 if how == "late" else 20.0)
    add(env, sums)
    part(env, sums, how)
    Path(os.environ["NOTES"]).write_text(json.dumps(notes))
    if env.rank == 0:
        time.sleep(2)  # it holds the store, in which the others look for who is lost
    os._exit(0)  # the group is broken, and cannot be closed in good order
