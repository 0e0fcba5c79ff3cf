"""Removes a directory once a process has ended: a program of its own, which imports nothing of this package.

It is run as `python -I -S memory_keeper.py DIRECTORY PID`, by the path of this file, and ends with the
process or with the directory. A second one for a directory ends at once: the first holds a lock.
"""

import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_LOOK_SECONDS = 0.25


def keep(directory: str, pid: int) -> None:
    """Wait until a process has ended, or the directory is gone, and remove the directory.

    Args:
        directory: The directory.
        pid: The process.
    """
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # It was removed, or another keeper is at work.
    # Not by a descriptor of the process, which some builds of Python and some sandboxes do not have.
    began = _began(pid)
    while began is not None and _began(pid) == began and os.fstat(lock).st_nlink:
        time.sleep(_LOOK_SECONDS)
    if not os.fstat(lock).st_nlink:
        return  # Another directory may have that name by now.
    for _ in range(20):  # A rank that is dying may still be writing.
        shutil.rmtree(directory, ignore_errors=True)
        if not Path(directory).exists():
            break
        time.sleep(0.05)


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if it has ended, also if nobody has waited for it."""
    try:
        # Behind the name of the program, which may hold anything: state, and 19 fields later the beginning.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 4096)  # Pipes of the rank: who reads from them must see that it has ended.
    os.chdir("/")
    keep(sys.argv[1], int(sys.argv[2]))
