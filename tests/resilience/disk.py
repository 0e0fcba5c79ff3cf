"""A small disk for the output of a run, which can be full."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_SIZE = 96 * 2**20
_FILLER = "somebody-elses-file"
_LARGEST_FILE = 64 * 2**10
"""Smaller than the weights of a checkpoint, larger than what a rank prints."""


class Disk:
    """A file system of its own in memory, where this user may mount one.

    Filled up by a file of somebody else, it refuses each further write with the system's "No space left on
    device". Where no file system may be mounted, the processes that write are not let make files beyond
    64 KiB instead: their writes fail as really, with "File too large".

    Args:
        folder: Where it is mounted; made if needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder)]
        self.is_mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_mounted:
            subprocess.run(["umount", str(self.folder)], check=True)

    @property
    def kind(self) -> str:
        """How it becomes full, for a log."""
        if self.is_mounted:
            return f"a tmpfs of {_SIZE // 2**20} MiB, filled up by another file"
        return f"files of the processes limited to {_LARGEST_FILE // 2**10} KiB, as this user mounts nothing"

    def fill(self, pids: Iterable[int]) -> None:
        """Leave no space.

        Args:
            pids: The processes that write.
        """
        if not self.is_mounted:
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
            return
        with (self.folder / _FILLER).open("ab") as file:
            while (left := self._space()) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), left)
                except OSError as error:  # the run has written in between
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Make space again."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    def _space(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize
