"""A directory in the memory of a machine that lives as long as a job's launcher.

A launcher that starts ranks again, such as torchrun with ``--max-restarts``, ends all of them when one is
lost. What they keep in shared memory is still there for those that come after them. It belongs to the job and
not to the run: its name holds the launcher's process, and it is gone soon after that, however it ends.
"""

import hashlib
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from checkpoint_core.directory import has_ended, machine_token, process_start
from checkpoint_core.errors import CheckpointError

LAUNCHER_VARIABLE = "CHECKPOINT_CORE_LAUNCHER_PID"
"""The process that starts this one again, as a launcher other than torchrun tells those that it starts."""
_ROOT = "/dev/shm"
_PREFIX = "checkpoint-core"
_NAME = re.compile(rf"{_PREFIX}-([0-9a-f]{{8}})-(\d+)-(\d+)-[0-9a-f]{{12}}")
_KINDS = ("tmpfs", "ramfs")
# Its path, and not an import: it needs modules that only Unix has.
_KEEPER = Path(__file__).with_name("memory_keeper.py")


class MemoryDirectory:
    """The directory in memory of one run of one job, the same for all ranks that a launcher starts here.

    Args:
        run: What tells the run from others that the same launcher may start, such as its output directory.
        launcher: The process that starts the ranks again, and with which the directory goes. None for the
            agent of torchrun, or the process that the variable CHECKPOINT_CORE_LAUNCHER_PID names, also where
            a shell stands between it and this process; else for the parent.
        root: A directory of a memory file system.
    """

    def __init__(self, run: str | Path, *, launcher: int | None = None, root: str | Path = _ROOT) -> None:
        self.launcher = _find_launcher() if launcher is None else launcher
        self._root = Path(root)
        began = process_start(self.launcher) or 0
        digest = hashlib.sha256(str(Path(run).absolute()).encode()).hexdigest()[:12]
        self.path = self._root / f"{_PREFIX}-{machine_token()}-{self.launcher}-{began}-{digest}"
        """The directory."""

    def open(self) -> Path:
        """Make the directory, and start the process that removes it once the launcher has ended.

        To be called by one rank of each node; again after a restart. What jobs that have ended have left,
        which were killed together with that process, is removed.

        Returns:
            The directory.

        Raises:
            CheckpointError: This machine has no file system in memory, or the directory cannot be made.
        """
        if not sys.platform.startswith("linux") or _kind_of(self._root) not in _KINDS:
            raise CheckpointError(
                f"{self._root} is not a file system in memory (tmpfs) on this machine, so checkpoints cannot "
                "be kept there. Mount one, or leave the memory tier out."
            )
        self._remove_stale()
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error.strerror}.") from error
        if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
            raise CheckpointError(f"{self.path} is another user's. Remove it.")
        # In a session of its own: what ends the ranks must leave it alone. Nobody waits for it: it ends when
        # this process, or one that comes after it, has long ended.
        program = [sys.executable, "-I", "-S", str(_KEEPER), str(self.path), str(self.launcher)]
        nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        try:
            os.posix_spawn(sys.executable, program, os.environ, setsid=True, file_actions=nowhere)
        except OSError as error:
            with suppress(OSError):
                self.path.rmdir()  # unless an earlier start has left checkpoints, and who removes them
            raise CheckpointError(
                f"{self.path} cannot be kept, because the process that would remove it does not start: "
                f"{error.strerror}."
            ) from error
        return self.path

    def remove(self) -> None:
        """Remove the directory, as a run does that has ended well."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_stale(self) -> None:
        for path in self._root.glob(f"{_PREFIX}-*"):
            found = _NAME.fullmatch(path.name)
            if found is None or found[1] != machine_token() or not has_ended(int(found[2]), int(found[3])):
                continue
            with suppress(FileNotFoundError):  # Another job may remove it as well.
                if not path.is_symlink() and path.stat().st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)


def _find_launcher() -> int:
    """The process that starts this one again, by id: the nearest above it that is known for that.

    Not the parent: that may be a shell or numactl, which ends with the rank.
    """
    told, run = os.environ.get(LAUNCHER_VARIABLE), os.environ.get("TORCHELASTIC_RUN_ID")
    pid = os.getppid()
    # To the end, which is 0: in a container the launcher is often process 1.
    while pid > 0 and (told or run):
        # torchrun gives it to the ranks, and does not have it itself. A process whose variables may not be
        # read is another user's, and so stands above the job.
        if str(pid) == told or (run is not None and not _has_variable(pid, f"TORCHELASTIC_RUN_ID={run}")):
            return pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            break
    return os.getppid()


def _has_variable(pid: int, entry: str) -> bool:
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _kind_of(directory: Path) -> str | None:
    """The file system that a directory is on, as the kernel names it; None if that cannot be told."""
    try:
        device = directory.stat().st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return None
