"""Which run owns an output directory: a lease in it, for as long as its holder lives.

The lease is one small file, ``.lease-<n>``: a line that tells the holder, with a random id, and a line with a
number that grows at every heartbeat. All that it needs of a file system is that making a file with O_EXCL is
atomic, as local ones and NFS (since version 3) promise. Locks are not used: some file systems lose them
silently, others keep them after a crash. No clock is compared with another's: who waits watches whether the
number changes, and for how long, by a clock of its own.

Taking it:

1. List the leases. Continue when every one is dead: its process, of this machine, has ended; or, where that
   process cannot be asked, nothing in the file has changed for the takeover time while we watched.
2. Make ``.lease-<n+1>``, n being the highest number there. Of several that want to succeed the same lease
   exactly one can; the others then meet the winner's, which is alive.
3. List again. If anything but our own file differs from 1, somebody else is at work, or a holder that was
   taken for dead has moved: remove our file and begin again. A slow process that listed long ago, and makes
   a number that was free again meanwhile, is caught here. Each removes its file before it looks again, so of
   two that make way for each other the later one to look finds nothing in its way.
4. Remove the dead ones. A process that ends between 2 and 4 leaves several; all of them are looked at in 1.

A holder that was suspended until another one took over finds its file gone, or with another id: at its next
heartbeat, and at every `DirectoryLease.check`. Two things no protocol closes without help of the storage. A
holder suspended right between a check and its write, for longer than the takeover time, still writes: so the
rename that publishes a checkpoint comes right behind a check. One suspended so between the last look and the
removal of its file, when it gives it back, may remove a third run's: that run notices at its next check.
"""

import errno
import json
import logging
import os
import random
import re
import socket
import threading
import time
import uuid
import weakref
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from checkpoint_core.directory import has_ended, machine_token, process_start
from checkpoint_core.errors import CheckpointError, LeaseLostError, describe_error
from checkpoint_core.store_path import local_directory

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"\.lease-(\d{1,9})")
_LARGEST_BYTES = 4096
_LONGEST_TAKEOVER_SECONDS = 30 * 86400.0
_LATEST_SECONDS = 1e11  # in the year 5138
_JOIN_SECONDS = 10.0
# ESTALE is how NFS says that a file was removed by another host.
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_POLL_SECONDS, _INCOMPLETE_POLL_SECONDS = 0.5, 0.02
_SAY_EVERY_SECONDS = 10.0


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
            if DirectoryLease.is_lease(path.name) and (content := _read(path)) is not None:
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


class LeaseHeldError(CheckpointError):
    """Another run owns the directory."""

    def __init__(self, directory: Path, holder: LeaseHolder) -> None:
        super().__init__(
            f"{directory} is in use by {holder.describe()}; wait until that run has ended, stop it, or "
            "choose another directory"
        )
        self.directory = directory
        self.holder = holder


class DirectoryLease:
    """The right to write to a directory, which one process at a time has.

    A process that dies without giving the lease back loses it: at once in the eyes of its own machine, after
    ``takeover_seconds`` without a heartbeat in those of others. A process of this machine that lives keeps
    it, however long it is busy. Readers need no lease.

    Args:
        directory: The directory; made if needed when the lease is taken.
        heartbeat_seconds: How often a thread shows other machines that the holder lives.
        takeover_seconds: How long others wait for a heartbeat before they take over; at least three times
            ``heartbeat_seconds``.

    Raises:
        CheckpointError: A time is out of range.
    """

    def __init__(
        self, directory: str | Path, *, heartbeat_seconds: float = 3.0, takeover_seconds: float = 60.0
    ) -> None:
        if not 0 < heartbeat_seconds <= takeover_seconds / 3:
            raise CheckpointError(
                f"heartbeat_seconds={heartbeat_seconds!r} must be above 0 and at most a third of "
                f"takeover_seconds, which is {takeover_seconds!r}, because a late heartbeat must not end "
                "the lease."
            )
        # Absolute: the program may change its directory.
        self.directory = local_directory(directory, "a DirectoryLease").absolute()
        self._heartbeat_seconds = heartbeat_seconds
        self._takeover_seconds = takeover_seconds
        self._holding: HeldLease | None = None

    @staticmethod
    def is_lease(name: str) -> bool:
        """Whether a file of this name in a directory is a lease.

        Args:
            name: The name, without the directory.

        Returns:
            Whether it is.
        """
        return _NAME.fullmatch(name) is not None

    @property
    def held(self) -> bool:
        """Whether this process took the lease and has not given it back; `check` asks the directory."""
        # A forked child has no part in it.
        return self._holding is not None and self._holding.pid == os.getpid()

    def acquire(self) -> Self:
        """Take the lease and show signs of life from then on. Nothing happens if this object holds it.

        A lease whose process is dead is taken over at once. One of another machine is watched: this raises at
        its next heartbeat, and takes over after the takeover time without one; a warning says how long.

        Returns:
            The lease itself.

        Raises:
            LeaseHeldError: Another process holds it, or another object of this process.
            CheckpointError: The directory cannot be made or written.
        """
        if self.held:
            return self
        try:
            made = not self.directory.is_dir()
            self.directory.mkdir(parents=True, exist_ok=True)
            watch = _Watch(self.directory, self._takeover_seconds)
            while (holding := self._take(watch.wait_until_dead(), made)) is None:
                # Others are at work; pauses of equal length would keep them in step.
                time.sleep(random.uniform(0.01, 0.1))
        except OSError as error:
            raise CheckpointError(
                f"cannot take the lease of {self.directory}: {describe_error(error)}"
            ) from error
        self._holding = holding
        # Also when this object is dropped, and at the end of the interpreter.
        weakref.finalize(self, holding.release)
        return self

    def check(self) -> None:
        """Make sure that the directory is this process's own; to be called before anything is written there.

        Raises:
            LeaseLostError: It is not: the lease was not taken, or another process has taken it over since.
        """
        if self._holding is None:
            raise LeaseLostError(f"{self.directory} is not leased. Call acquire() before writing to it.")
        self._holding.check()

    def release(self) -> None:
        """Give the lease back; a directory that was made for it, and is empty, goes with it."""
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.release()

    def __enter__(self) -> Self:
        """Take the lease."""
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lease back."""
        self.release()

    def _take(self, standing: list[LeaseFile], made: bool) -> HeldLease | None:
        """Steps 2 to 4; None when somebody else is at work."""
        number = max((found.number for found in standing), default=0) + 1
        path = self.directory / f".lease-{number}"
        try:
            head = create_lease(path, self._takeover_seconds)
        except FileNotFoundError:
            # A run that had made the directory has given it back, and the directory with it.
            self.directory.mkdir(parents=True, exist_ok=True)
            return None
        if head is None:
            return None
        try:
            if [found for found in read_leases(self.directory) if found.path != path] != standing:
                path.unlink(missing_ok=True)
                return None
            for found in standing:
                found.path.unlink(missing_ok=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        for found in standing:
            _logger.warning("%s: taken over from %s", self.directory, found.describe())
        return HeldLease(path, head, self._heartbeat_seconds, made_directory=made)


def find_lease_holder(directory: str | Path) -> LeaseHolder | None:
    """Who owns a directory, as far as can be told without waiting.

    Args:
        directory: The directory, which need not exist.

    Returns:
        The holder of a lease that lives or may live; None if there is none. One of another machine (see
        `LeaseHolder.is_here`) may have died since its last heartbeat.
    """
    for found in reversed(read_leases(local_directory(directory, "find_lease_holder()"))):
        holder = found.holder
        if holder is not None and not holder.has_ended():
            return holder
    return None


class _Watch:
    """Watches the leases of a directory until all of them are dead."""

    def __init__(self, directory: Path, takeover_seconds: float) -> None:
        self._directory = directory
        self._takeover_seconds = takeover_seconds
        # What was read first of a lease, and when. What counts is that it is read again, unchanged, so much
        # later: a time in which this process itself was suspended proves nothing by itself.
        self._first: dict[tuple[Path, bytes], tuple[bytes, float]] = {}
        self._said = float("-inf")

    def wait_until_dead(self) -> list[LeaseFile]:
        """Wait until every lease is dead, and return them.

        Raises:
            LeaseHeldError: One of them lives.
        """
        while True:
            standing = read_leases(self._directory)
            left = [(self._seconds_left(found), found) for found in standing]
            longest = max((seconds for seconds, _ in left), default=0.0)
            if longest <= 0:
                return standing
            watched = next(found for seconds, found in left if seconds == longest)
            pause = _POLL_SECONDS
            if watched.holder is None and longest > self._takeover_seconds - 1:
                pause = _INCOMPLETE_POLL_SECONDS  # It is probably being written at this moment.
            else:
                self._say(watched, longest)
            time.sleep(min(pause, longest))

    def _seconds_left(self, found: LeaseFile) -> float:
        """Seconds until a lease counts as dead."""
        holder = found.holder
        if holder is not None and holder.has_ended():
            return 0.0
        if holder is not None and holder.is_here():
            raise LeaseHeldError(self._directory, holder)
        now = time.monotonic()
        before, since = self._first.setdefault((found.path, found.identity), (found.content, now))
        if holder is None:
            return since + self._takeover_seconds - now
        if before != found.content:
            raise LeaseHeldError(self._directory, holder)
        # What its holder has promised counts, not what this process would have.
        return since + holder.takeover_seconds - now

    def _say(self, found: LeaseFile, seconds: float) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_EVERY_SECONDS:
            self._said = now
            _logger.warning(
                "%s is held by %s, and only a heartbeat could tell whether that process still lives; without "
                "one it is taken over in %d s",
                self._directory,
                found.describe(),
                round(seconds),
            )
