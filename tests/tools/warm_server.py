"""The process that forks scripts: `warm_server.py SOCKET MODULE...`; see `warm_start.py`."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import weakref
from typing import Any

# The exit code of a script that has come to its end; None where the interpreter has to find it.
_code: int | None = None


def main(descriptor: int, modules: list[str]) -> None:
    """Fork until nobody asks any more, and run a script or module in each child."""
    global _code
    # What is registered first is done last.
    atexit.register(_end_at_once)
    for name in modules:
        module = importlib.import_module(name)
        # Our packages load what their names stand for when these are first used: here, not in each child.
        for public in getattr(module, "__all__", ()):
            getattr(module, public)
    # A child that looked for garbage in what is there now would copy all of its pages.
    gc.freeze()
    # So it would if it took torch's operators out of torch, one by one, as these finalizers do.
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    job = _serve(socket.socket(fileno=descriptor))
    if job is None:
        _code = 0
    else:
        _become(job)
        _run(job["words"])


def _run(words: list[str]) -> None:
    global _code
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            _code = stop.code or 0
        raise
    _code = 0


def _end_at_once() -> None:
    """End after everything else that is done at the end, without taking modules apart.

    That takes half a second of a core in a forked process: it copies most of the pages that it shares. A test
    of that end sets TAKE_APART in the environment of its process.
    """
    if _code is not None and "TAKE_APART" not in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_code)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the child, and None in the parent when all is over."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: set[int] = set()
    read = b""
    while True:
        ready = select.select([connection, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            _tell_ended(connection, running)
        if connection not in ready:
            continue
        received = connection.recv(65536)
        if not received:
            break
        *lines, read = (read + received).split(b"\n")
        for line in lines:
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (ended, wake):
                    os.close(descriptor)
                connection.close()
                request: dict[str, Any] = json.loads(line)
                return request
            running.add(process)
            _tell(connection, {"started": process})
    for process in running:
        os.kill(process, signal.SIGKILL)
    return None


def _tell_ended(connection: socket.socket, running: set[int]) -> None:
    for process in list(running):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            running.discard(process)
            _tell(connection, {"ended": process, "code": os.waitstatus_to_exitcode(status)})


def _tell(connection: socket.socket, message: dict[str, int]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _become(job: dict[str, Any]) -> None:
    """Be the process of a script, as if it had been started with its own words and environment."""
    os.chdir(job["folder"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for stream, (path, mode) in enumerate(
        ((os.devnull, os.O_RDONLY), (job["out"], flags), (job["err"], flags))
    ):
        opened = os.open(path, mode, 0o644)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = list(job["words"])
    sys.path[:0] = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
