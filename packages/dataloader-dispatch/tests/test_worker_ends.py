"""Worker processes of loaders end with the process that reads, whatever they are doing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
PROMISED = 2.0 + 8.0
"""Seconds after which nobody is left, and what a busy machine may add."""
PATIENCE = 60.0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_no_worker_of_any_loader_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    """torch's own watch looks between two items only: a worker that waits for a slow file is not reached."""
    parent = subprocess.Popen([sys.executable, str(WORKERS / "starting_loaders.py"), str(tmp_path)])
    deadline = time.monotonic() + PATIENCE
    while (
        len(found := list(tmp_path.iterdir())) < 5 and time.monotonic() < deadline and parent.poll() is None
    ):
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    pids = {path.stem: int(path.suffix[1:]) for path in found}
    deadline = time.monotonic() + PROMISED
    while (left := [name for name, pid in pids.items() if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for name in left:
        os.kill(pids[name], signal.SIGKILL)
    assert sorted(pids) == ["dispatched", "iterable", "map-style", "parent", "stream"]
    assert left == []
