"""Who made a temporary directory, and whether that process still lives.

Temporary directories are hidden siblings of the checkpoints: ``.<kind>-checkpoint-<step>-<token>``. The token
names the machine, the process and its start time, so that a later process can tell a save in progress from
what a killed one left behind. The name carries it because a name appears in one atomic step.
"""

import hashlib
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

STAGING = "tmp"
"""A checkpoint being written."""
REPLACED = "old"
"""A committed checkpoint, put aside while another one of the same step takes its place."""
DELETED = "del"
"""A checkpoint being deleted."""

FOREIGN_IDLE_SECONDS = 3600.0
"""A process of another machine cannot be asked; its directory is dead after this time without a write."""

_NAME = re.compile(
    rf"\.({STAGING}|{REPLACED}|{DELETED})-checkpoint-(\d+)-([0-9a-f]{{8}})-(\d+)-(\d+)-[0-9a-f]{{8}}"
)


@dataclass(frozen=True)
class Leftover:
    """A temporary directory found in an output directory."""

    path: Path
    kind: str
    step: int
    machine: str
    pid: int
    started: int

    def is_abandoned(self) -> bool:
        """Whether the process that made it is gone.

        Returns:
            On the machine of the owner, whether the process has ended. On another machine, whether nothing in
            the directory has changed for an hour.
        """
        if self.machine != machine_token():
            return time.time() - _newest_change(self.path) > FOREIGN_IDLE_SECONDS
        return has_ended(self.pid, self.started)


def temporary_path(output_dir: Path, kind: str, step: int) -> Path:
    """A fresh name for a temporary directory of this process.

    Args:
        output_dir: The directory of the checkpoints.
        kind: :data:`STAGING`, :data:`REPLACED` or :data:`DELETED`.
        step: The step of the checkpoint.

    Returns:
        The path; nothing is created.
    """
    token = f"{machine_token()}-{os.getpid()}-{process_start(os.getpid()) or 0}-{uuid.uuid4().hex[:8]}"
    return output_dir / f".{kind}-checkpoint-{step}-{token}"


def find_leftovers(output_dir: Path) -> list[Leftover]:
    """All temporary directories in an output directory, of living and dead processes.

    Args:
        output_dir: The directory of the checkpoints.

    Returns:
        The directories; empty when ``output_dir`` does not exist.
    """
    if not output_dir.is_dir():
        return []
    found = []
    for path in sorted(output_dir.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            kind, step, machine, pid, started = match.groups()
            found.append(Leftover(path, kind, int(step), machine, int(pid), int(started)))
    return found


def machine_token() -> str:
    """Eight digits for this machine, boot and process namespace: where a process id has one meaning.

    Returns:
        The digits; processes with the same ones can ask the system about one another.
    """
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(source)
        if path.is_symlink():
            parts.append(str(path.readlink()))
        elif path.exists():
            parts.append(path.read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def has_ended(pid: int, started: int) -> bool:
    """Whether a process of this machine has ended.

    Args:
        pid: Its id.
        started: What :func:`process_start` gave for it.

    Returns:
        Whether it is certain that it has.
    """
    now = process_start(pid)
    # 0: it lives, and when it began cannot be told.
    return now is None or (now != started and 0 not in (now, started))


def process_start(pid: int) -> int | None:
    """When a process of this machine began, which tells it from a later one with the same id.

    Args:
        pid: The process id.

    Returns:
        Clock ticks since boot; None when there is no such process. Systems without /proc give 0 for every
        living process, and those that hide other users' processes for these, so that only the id tells there.
    """
    if Path("/proc/self/stat").exists():
        try:
            # The second field, the command in parentheses, may hold spaces; field 22 is counted after it.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return _ask_by_signal(pid)
        # A killed process that nobody has waited for yet still has an entry, but writes no more.
        return None if fields[0] in "ZX" else int(fields[19])
    return _ask_by_signal(pid)


def _ask_by_signal(pid: int) -> int | None:
    """0 for a process that exists, which may be another user's."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return 0
    return 0


def _newest_change(directory: Path) -> float:
    newest = 0.0
    for path in [directory, *directory.rglob("*")]:
        try:
            newest = max(newest, path.lstat().st_mtime)
        except FileNotFoundError:
            continue  # Being written or removed at this moment.
    return newest
