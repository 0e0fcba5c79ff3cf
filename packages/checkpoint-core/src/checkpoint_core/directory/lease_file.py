"""The file of a lease: who holds it, and the signs of life in it."""

import errno
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from checkpoint_core.directory.ownership import has_ended, machine_token, process_start
from checkpoint_core.errors import LeaseLostError, describe_error

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"\.lease-(\d{1,9})")
_LARGEST_BYTES = 4096
_LONGEST_TAKEOVER_SECONDS = 30 * 86400.0
_LATEST_SECONDS = 1e11  # in the year 5138
_JOIN_SECONDS = 10.0
# ESTALE is how NFS says that a file was removed by another host.
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


@dataclass(frozen=True)
class LeaseHolder:
    """Who holds a lease, as its file tells."""

    lease_id: str
    host: str
    pid: int
    machine: str
    """Digits for the machine, its boot and process namespace."""
    started: int
    """Start of the process, in clock ticks since boot."""
    since: float
    """When the lease was taken, in seconds since 1970 by the holder's clock; for people only."""
    takeover_seconds: float
    """How long the holder counts as alive without a heartbeat."""

    def describe(self) -> str:
        """The holder in words, such as ``process 4711 on node-7, since 2026-01-31 12:00:00 UTC``."""
        since = datetime.fromtimestamp(self.since, UTC)
        return f"process {self.pid} on {self.host}, since {since:%Y-%m-%d %H:%M:%S} UTC"

    def is_here(self) -> bool:
        """Whether the system can be asked about the process."""
        return self.machine == machine_token()

    def has_ended(self) -> bool:
        """Whether it is certain that the process has ended."""
        return self.is_here() and has_ended(self.pid, self.started)


@dataclass(frozen=True)
class LeaseFile:
    """A lease as it was read."""

    path: Path
    content: bytes

    @property
    def number(self) -> int:
        """The number in its name."""
        return int(self.path.name.rpartition("-")[2])

    @property
    def identity(self) -> bytes:
        """The part that no heartbeat changes."""
        return self.content.partition(b"\n")[0]

    @property
    def holder(self) -> LeaseHolder | None:
        """Who holds it; None where the file is still being written, or damaged."""
        try:
            values = json.loads(self.identity)
            holder = LeaseHolder(**values)
        except (ValueError, TypeError, RecursionError):
            return None
        if any(type(values[field.name]) is not field.type for field in fields(LeaseHolder)):
            return None
        in_range = holder.pid > 0 and 0 <= holder.since < _LATEST_SECONDS
        return holder if in_range and 0 < holder.takeover_seconds <= _LONGEST_TAKEOVER_SECONDS else None

    def describe(self) -> str:
        """The holder in words."""
        holder = self.holder
        return f"an unknown process ({self.path.name} does not tell)" if holder is None else holder.describe()


def is_lease(name: str) -> bool:
    """Whether a file of this name in a directory is a lease.

    Args:
        name: The name, without the directory.

    Returns:
        Whether it is.
    """
    return _NAME.fullmatch(name) is not None


def read_leases(directory: Path) -> list[LeaseFile]:
    """The leases in a directory.

    Args:
        directory: The directory.

    Returns:
        The leases by number; none where the directory does not exist.
    """
    found = []
    try:
        for path in directory.iterdir():
            if is_lease(path.name) and (content := _read(path)) is not None:
                found.append(LeaseFile(path, content))
    except OSError as error:
        if error.errno not in _GONE:
            raise
    return sorted(found, key=lambda each: each.number)


def create_lease(path: Path, takeover_seconds: float) -> bytes | None:
    """Make the file of a lease of this process.

    Args:
        path: Where.
        takeover_seconds: What it promises to others.

    Returns:
        Its identity; None where the file is there already.

    Raises:
        OSError: It cannot be written; nothing is left then.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return None
    pid = os.getpid()
    holder = LeaseHolder(
        lease_id=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=pid,
        machine=machine_token(),
        started=process_start(pid) or 0,
        since=time.time(),
        takeover_seconds=float(takeover_seconds),
    )
    head = json.dumps(vars(holder)).encode("ascii") + b"\n"
    try:
        try:
            _write_all(descriptor, head + _beat_line(0), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return head


class HeldLease:
    """A lease that this process has taken: its file, and the thread that shows signs of life in it.

    Every access opens the file by name: on NFS this asks the server, and so sees that another host removed
    it. What is written after that goes to the file that was opened, never into a successor's.

    Args:
        path: The file.
        head: Its identity, as :func:`create_lease` gave it.
        heartbeat_seconds: Time between two signs of life.
        made_directory: Whether the directory was made for it, and goes with it when it is empty.
    """

    def __init__(self, path: Path, head: bytes, heartbeat_seconds: float, *, made_directory: bool) -> None:
        self.pid = os.getpid()
        self._path = path
        self._head = head
        self._made_directory = made_directory
        self._beats = 0
        self._lost: str | None = None
        self._seconds = heartbeat_seconds
        self._ended = threading.Event()
        # A daemon: a program that forgets to give the lease back must be able to end.
        self._thread = threading.Thread(target=self._beat_on, name=f"lease of {path.parent}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLostError if the file is no longer there, is another's, or cannot be read."""
        if self._lost is None:
            try:
                descriptor = self._open(os.O_RDONLY)
            except OSError as error:
                raise LeaseLostError(
                    f"cannot tell whether {self._path.parent} is still this run's own: "
                    f"{describe_error(error)}"
                ) from error
            if descriptor is not None:
                os.close(descriptor)
        if self._lost is not None:
            raise LeaseLostError(self._lost)

    def release(self) -> None:
        """Remove the file if it is still ours; once, and only by the process that took it."""
        if self.pid != os.getpid() or self._ended.is_set():
            return
        self._ended.set()
        # The garbage collector may come by in that thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        try:
            descriptor = self._open(os.O_RDONLY) if self._lost is None else None
            if descriptor is not None:
                os.close(descriptor)
                self._path.unlink(missing_ok=True)
            if self._made_directory and not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()
        except OSError as error:
            if error.errno not in (*_GONE, errno.ENOTEMPTY):
                _logger.warning("cannot give back %s (%s)", self._path, describe_error(error))

    def _beat_on(self) -> None:
        faulty = False
        while self._lost is None and not self._ended.wait(self._seconds):
            try:
                self._beat()
            except OSError as error:
                if not faulty:
                    text = "cannot show a sign of life in %s (%s); another machine may take it over"
                    _logger.warning(text, self._path, describe_error(error))
                faulty = True
            else:
                faulty = False
        if self._lost is not None:
            _logger.error("%s", self._lost)

    def _beat(self) -> None:
        descriptor = self._open(os.O_RDWR)
        if descriptor is None:
            return
        try:
            self._beats += 1
            _write_all(descriptor, _beat_line(self._beats), len(self._head))
        finally:
            # On NFS others see what was written from here on.
            os.close(descriptor)

    def _open(self, flags: int) -> int | None:
        """Open the file; None, and the lease is lost, if it is not ours any more."""
        try:
            descriptor = os.open(self._path, flags | os.O_CLOEXEC)
            try:
                ours = os.pread(descriptor, len(self._head), 0) == self._head
            except BaseException:
                os.close(descriptor)
                raise
            if ours:
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        others = [f"{found.describe()} has it" for found in reversed(read_leases(self._path.parent))]
        self._lost = (
            f"{self._path.parent} is no longer this run's own: its lease {self._path.name} was taken over or "
            f"removed; {others[0] if others else 'nobody has it'} now. Nothing more is written there; start "
            "this run again when no other one uses the directory"
        )
        return None


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_BYTES)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _beat_line(number: int) -> bytes:
    return b"%012d\n" % number


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
