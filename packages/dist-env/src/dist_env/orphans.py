"""Processes that die with the one that started them, also when that one is killed.

A process that is ended by SIGKILL ends nobody else: its children live on, hold their memory and the GPU, and
may wait for ever. Linux sends a child a signal when its parent dies, if the child asks for it
(`prctl(PR_SET_PDEATHSIG)`, https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html). Three things
are to be known of that signal:

* It is sent when the *thread* ends that started the child. A child of another thread than the main one, which
  lives as long as its process, looks for its parent's pid instead.
* A parent that died before the child asked sends nothing: the child looks for its parent's pid afterwards.
* It is kept by `exec` and not by `fork`: each process asks for itself.

This file is also run by its path, without its package, which would import torch first: it imports nothing but
the standard library, and of that little.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

TIES = "__tie__"
"""Run under this name, with the variable `arguments`, the file ties the process: see `worker_processes`."""
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5


def die_with_parent(parent: int, *, by_main_thread: bool = True) -> None:
    """Let this process be killed when its parent ends, or now if it has ended already.

    Elsewhere than on Linux, and if another thread than the main one started this process, a thread of this
    process looks for its parent twice a second.

    Args:
        parent: Process id of the parent, as the parent told it: an orphan that asks here learns another one.
        by_main_thread: Whether the main thread of the parent started this process.
    """
    tie(parent, by_main_thread, True)


def die_with_parent_command(command: Sequence[str]) -> list[str]:
    """A command that runs another one, in the same process, which is killed when the caller's process ends.

    To be started by the calling thread, on this machine. It is tied before it imports anything. Elsewhere
    than on Linux it is the command as it is, and a warning says so.

    Args:
        command: A program, and its arguments.

    Raises:
        RuntimeError: Another thread than the main one calls: the command would be killed when that ends.
    """
    if not sys.platform.startswith("linux"):
        from dist_env.logging import get_logger

        get_logger("dist_env").warning(
            "processes that this one starts live on when it is killed: only on Linux can they ask to end."
        )
        return list(command)
    if not is_main_thread():
        raise RuntimeError(
            "die_with_parent_command was called outside the main thread, and the kernel would kill the "
            "command when this thread ends. Start the command from the main thread."
        )
    # Isolated, and without site-packages: nothing is imported that takes time, or is not ours.
    return [sys.executable, "-I", "-S", os.path.realpath(__file__), str(os.getpid()), *command]


def die_with_torchrun() -> None:
    """Let this process be killed when torchrun ends, if torchrun started it; `import dist_env` calls it.

    torchrun makes each rank the leader of a session, and sets TORCHELASTIC_RUN_ID for it. What a rank starts
    leads no session, or has a parent with this variable, and is left alone; so is a process that no torchrun
    started, such as one of a shell, a notebook or a scheduler.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None or not sys.platform.startswith("linux") or os.getsid(0) != os.getpid():
        return
    parent = os.getppid()
    try:
        variables = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return  # it has ended, or is another user's, such as that of a daemon: pid 1
    if f"TORCHELASTIC_RUN_ID={run}".encode() not in variables:
        die_with_parent(parent)


def is_main_thread() -> bool:
    """Whether this is the thread that lives as long as the process."""
    return threading.get_native_id() == os.getpid() or not sys.platform.startswith("linux")


def tie(ancestor: int, by_main_thread: bool, direct: bool) -> None:
    """Tie this process to one that started it, or had it started by another (`direct` is false)."""
    if direct:
        asked = by_main_thread and _ask_kernel()
        if os.getppid() != ancestor:
            _kill_this_process()
        if asked:
            return
    watch = threading.Thread(target=_watch, args=(ancestor, direct), name="die with parent", daemon=True)
    watch.start()


def _ask_kernel() -> bool:
    """Ask for SIGKILL when the thread ends that started this process; False if that cannot be asked for."""
    if not sys.platform.startswith("linux"):
        return False
    nothing = ctypes.c_ulong(0)
    number = ctypes.c_ulong(signal.SIGKILL)
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, nothing, nothing, nothing) == 0)


def _watch(ancestor: int, direct: bool) -> None:
    while os.getppid() == ancestor if direct else _is_alive(ancestor):
        time.sleep(_LOOK_SECONDS)
    _kill_this_process()


def _is_alive(pid: int) -> bool:
    """Whether a process that is not this one's parent runs; not if only its exit code is left of it."""
    try:
        os.kill(pid, 0)
        return not sys.platform.startswith("linux") or b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except (ProcessLookupError, FileNotFoundError):
        return False


def _kill_this_process() -> None:
    """End as the kernel would end it: no handler and no other thread of this process can stand in the way."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
elif __name__ == TIES:
    tie(*globals()["arguments"])
