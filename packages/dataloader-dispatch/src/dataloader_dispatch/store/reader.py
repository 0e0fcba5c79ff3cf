"""What reads from object stores in this process: through the cache on the disk, and a fetcher of its own."""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.store.block_cache import (
    BLOCK_BYTES,
    SMALL_BLOCK_BYTES,
    WHOLE,
    BlockCache,
    object_name,
)
from dataloader_dispatch.store.fetcher import CACHE, CHANGED, GONE, SETTINGS
from dataloader_dispatch.store.messages import EndedError, Message, receive, send
from dist_env import StoreError, die_with_parent_command

logger = logging.getLogger("dataloader_dispatch")

DIRECTORY_VARIABLE = "DATALOADER_DISPATCH_CACHE_DIR"
LIMIT_VARIABLE = "DATALOADER_DISPATCH_CACHE_BYTES"
DEFAULT_LIMIT = 16 << 30
SMALLEST_LIMIT = 8 * BLOCK_BYTES
TIMEOUT_SECONDS = 600.0
"""As for `ObjectStore`, which repeats a request for a tenth of it while its failure may pass: a minute."""
_BLOCKS_AT_ONCE = 32
"""Of a large document, what one request asks for."""
_MOST_AHEAD_BYTES = 8 << 20
"""Of one document, what is fetched ahead; the rest is fetched in parallel when it is read."""
_IN_PARTS = (".jsonl", ".bin", ".idx")
"""Of these a document is a small part."""
_TRIES = 3
_END_SECONDS = 5.0
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dataloader_dispatch.store.fetcher import main; main()"
)


class UnavailableError(Exception):
    """The object is gone, or was replaced since it was listed; the text says which, with the remedy."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where blocks are kept, and how many.

    Attributes:
        directory: The cache; empty for none.
        limit: Bytes that all files in it may take together.
        timeout_seconds: As for `ObjectStore`.
    """

    directory: str
    limit: int
    timeout_seconds: float


def cache_settings(directory: str | os.PathLike[str] | None, limit: int | None) -> CacheSettings:
    """The settings of the cache: those given, of the environment, or the defaults.

    Args:
        directory: The cache; None for ``DATALOADER_DISPATCH_CACHE_DIR``, or a directory in the user's cache,
            or below that of temporary files where this cannot be made.
        limit: Bytes; None for ``DATALOADER_DISPATCH_CACHE_BYTES``, or 16 GiB or a tenth of the disk's free
            space, whichever is less.

    Raises:
        DataError: The limit is not a number of bytes of at least 8 MiB.
    """
    name: str = "cache_bytes"
    value: object = limit
    if limit is None and (text := os.environ.get(LIMIT_VARIABLE)):
        name, value = LIMIT_VARIABLE, int(text) if text.isascii() and text.isdecimal() else text
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < SMALLEST_LIMIT
    ):
        raise DataError(
            f"{name}={value!r} must be a number of bytes of at least {SMALLEST_LIMIT}, such as {16 << 30} "
            "for 16 GiB."
        )
    if directory is not None and not os.fspath(directory):
        raise DataError("cache_dir='' is empty. Name a directory, or leave it out for the default.")
    chosen = directory or os.environ.get(DIRECTORY_VARIABLE)
    place = Path(chosen).expanduser().absolute() if chosen else _default_directory()
    failure = _make_directory(place)
    if failure:
        logger.warning(
            "the cache %s cannot be used (%s): what is read from object stores is not kept, and is fetched "
            "anew each time. Set cache_dir, or %s, to a directory that can be written",
            place,
            failure,
            DIRECTORY_VARIABLE,
        )
        return CacheSettings("", SMALLEST_LIMIT, TIMEOUT_SECONDS)
    if isinstance(value, int):
        return CacheSettings(str(place), value, TIMEOUT_SECONDS)
    free = shutil.disk_usage(place).free
    limit = max(SMALLEST_LIMIT, min(DEFAULT_LIMIT, free // 10))
    return CacheSettings(str(place), limit, TIMEOUT_SECONDS)


def _default_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        place = Path(base).expanduser() / "dataloader-dispatch"
    except RuntimeError:  # a user without a home
        place = None
    if place is None or _make_directory(place):
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"dataloader-dispatch-{user}"
    return place


def _make_directory(place: Path) -> str:
    """Make a directory that only its user can read; why not, if it cannot be written."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error.strerror or error)
    effective = os.access in os.supports_effective_ids
    return "" if os.access(place, os.W_OK | os.X_OK, effective_ids=effective) else "no permission to write"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object that is read in ranges. Copies for other processes hold nothing that is open.

    Attributes:
        root: The store, such as ``s3://bucket``.
        key: The object.
        size: Bytes.
        version: What tells this content from a later one.
        settings: Those of the cache.
        modified: When it was written, by the clock of the store, in seconds since 1970.
        block_bytes: Bytes of a block of it in the cache.
    """

    root: str
    key: str
    size: int
    version: Mapping[str, str]
    settings: CacheSettings
    modified: float = 0.0
    block_bytes: int = BLOCK_BYTES
    _name: str = field(init=False, compare=False, repr=False)
    _cache: BlockCache | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Stores that give no tag of the content tell at least when it was written.
        tag = self.version.get("e_tag", "")
        told = {"e_tag": tag} if tag else {**self.version, "modified": repr(self.modified)}
        name = object_name(self.root, self.key, self.size, {**told, "block_bytes": str(self.block_bytes)})
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_cache", _cache(self.settings))

    def __getstate__(self) -> tuple[Any, ...]:
        version = dict(self.version)
        return self.root, self.key, self.size, version, self.settings, self.modified, self.block_bytes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        names = ("root", "key", "size", "version", "settings", "modified", "block_bytes")
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __str__(self) -> str:
        """The address."""
        return f"{self.root}/{self.key}"

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` up to, not including, ``stop``; fewer at the end of the object.

        Raises:
            UnavailableError: The object is gone, or was replaced.
            StoreError: The store did not answer as it should.
        """
        stop = min(stop, self.size)
        if start >= stop:
            return b""
        first, last = start // self.block_bytes, (stop - 1) // self.block_bytes
        if first == last:
            return self._piece(first, start, stop, {})
        pieces, fetched = [], {}
        for block in range(first, last + 1):
            if (block - first) % _BLOCKS_AT_ONCE == 0:
                missing = [
                    one
                    for one in range(block, min(block + _BLOCKS_AT_ONCE, last + 1))
                    if not self._holds(one)
                ]
                fetched = self._fetch(missing) if missing else {}
            pieces.append(self._piece(block, start, stop, fetched))
        return b"".join(pieces)

    def read_ahead(self, start: int, stop: int) -> list[int]:
        """Numbers of the blocks of a range that are worth fetching ahead, as the cache lacks them."""
        stop = min(stop, self.size, start + _MOST_AHEAD_BYTES)
        if start >= stop:
            return []
        blocks = range(start // self.block_bytes, (stop - 1) // self.block_bytes + 1)
        return [block for block in blocks if not self._holds(block)]

    def local_copy(self) -> str:
        """The path of a file that holds the whole object. It may be removed again when others need its room.

        Raises:
            UnavailableError: The object is gone, or was replaced.
            StoreError: The store did not answer as it should, or the disk or the limit leaves no room.
        """
        cache = self._cache
        if cache is None or not cache.holds(self._name, WHOLE, self.size):
            self._ask({"do": WHOLE, "content": self._told()})
        return "" if cache is None else cache.path(self._name, WHOLE)

    def _holds(self, block: int) -> bool:
        cache = self._cache
        return cache is not None and cache.holds(self._name, block, self._length(block))

    def _piece(self, block: int, start: int, stop: int, fetched: Mapping[int, bytes]) -> bytes:
        """What a block holds of a range."""
        offset, length = block * self.block_bytes, self._length(block)
        begin, end = max(start - offset, 0), min(stop - offset, length)
        cache = self._cache
        for attempt in range(_TRIES):
            if block in fetched:
                return fetched[block][begin:end]
            data = None if cache is None else cache.read(self._name, block, length, begin, end)
            if data is not None:
                return data
            # Others may need the room so badly that a block is gone before it is read.
            fetched = self._fetch([block], direct=attempt == _TRIES - 2)
        raise StoreError(
            f"{self} cannot be read: block {block} did not come. Look at the disk of the cache "
            f"{self.settings.directory}, or set cache_dir to another directory"
        )

    def _length(self, block: int) -> int:
        return min(self.block_bytes, self.size - block * self.block_bytes)

    def _told(self) -> list[Any]:
        return [self.root, self.key, self.size, dict(self.version), self._name, self.block_bytes]

    def _fetch(self, blocks: list[int], direct: bool = False) -> dict[int, bytes]:
        """Have blocks put into the cache; those that could not be put there, by number."""
        message = {"do": "read", "content": self._told(), "blocks": blocks, "direct": direct}
        answer, blobs = self._ask(message)
        if (warning := answer.get("warning", "")) not in ("", "-"):
            _warn_once(self.settings.directory, warning)
        return dict(zip(answer["blocks"], blobs, strict=True))

    def _ask(self, message: Message) -> tuple[Message, list[bytes]]:
        answer, blobs = connection(self.settings, self.root).ask(message)
        match answer.get("kind"):
            case None:
                return answer, blobs
            case kind if kind == GONE:
                raise UnavailableError(f"{self} does not exist any more.")
            case kind if kind == CHANGED:
                raise UnavailableError(
                    f"{self} was replaced since it was opened, so its documents are not those of then. Open "
                    "the data again, or put the object back as it was."
                )
            case kind if kind == CACHE:
                raise StoreError(
                    f"{self} has {self.size} bytes, and is needed as one file, which cannot be "
                    f"written to the cache {self.settings.directory or '(none)'} of at most "
                    f"{self.settings.limit} bytes: {answer['text']}. Raise cache_bytes, make room, or set "
                    "cache_dir to another directory"
                )
        raise _error(answer)


def _error(answer: Message) -> Exception:
    return (DataError if answer["kind"] == SETTINGS else StoreError)(answer["text"])


class StoredStream(io.RawIOBase):
    """An object as a file that can be read and sought, such as pyarrow takes.

    Args:
        file: The object.
        ahead: Whether it will be read from its start to its end.
    """

    def __init__(self, file: StoredFile, ahead: bool = False) -> None:
        self._file = file
        self._at = 0
        self._announced = 0 if ahead else file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._announced < self._file.size and self._at + 4 * _MOST_AHEAD_BYTES > self._announced:
            start, self._announced = self._announced, self._announced + _MOST_AHEAD_BYTES
            announce([(self._file, start, self._announced)])
        data = self._file.read(self._at, self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def announce(ranges: Iterable[tuple[StoredFile, int, int]]) -> None:
    """Have ranges fetched in the background. What goes wrong shows when they are read."""
    wanted: dict[int, tuple[StoredFile, set[int]]] = {}
    for file, start, stop in ranges:
        if blocks := file.read_ahead(start, stop):
            wanted.setdefault(id(file), (file, set()))[1].update(blocks)
    by_settings: dict[tuple[CacheSettings, str], list[list[Any]]] = {}
    for file, chosen in wanted.values():
        if file.settings.directory:
            entry = [*file._told(), sorted(chosen)]
            by_settings.setdefault((file.settings, file.root), []).append(entry)
    for (settings, root), contents in by_settings.items():
        connection(settings, root).tell({"do": "ahead", "contents": contents})


class Connection:
    """The fetcher of this process. It is started when it is first asked, and once more if it ended."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def ask(self, message: Message) -> tuple[Message, list[bytes]]:
        """Send a request, and wait for its answer.

        Raises:
            StoreError: The fetcher ended twice.
        """
        with self._lock:
            for _ in range(2):
                try:
                    return self._exchange(message)
                except EndedError:
                    how = self._ended()
                except BaseException:
                    # Ctrl-C in the middle of an answer: what comes next would be read as another one's.
                    self.end()
                    raise
        raise StoreError(
            f"the process that reads from object stores for process {os.getpid()} ended twice ({how}). If "
            "memory was short, use fewer worker processes; what it printed on standard error may tell more"
        )

    def tell(self, message: Message) -> None:
        """Send what has no answer."""
        with self._lock:
            try:
                send(self._started(), message)
            except EndedError:
                self._ended()
            except BaseException:
                self.end()
                raise

    def end(self) -> None:
        """End the fetcher, which it does by itself when the socket is closed."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def forget(self) -> None:
        """Let go of a fetcher that belongs to the process from which this one was forked."""
        if self._process is not None:
            self._process.returncode = 0  # nothing is to be waited for here
        self.end()

    def close(self) -> None:
        """End the fetcher, and wait until it has ended."""
        self.end()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _exchange(self, message: Message) -> tuple[Message, list[bytes]]:
        channel = self._started()
        self._number += 1
        send(channel, {**message, "number": self._number})
        while True:
            answer, blobs = receive(channel)
            if answer["number"] == self._number:
                return answer, blobs

    def _ended(self) -> str:
        self.end()
        if self._process is None:
            return "unknown"
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _started(self) -> socket.socket:
        if self._channel is None:
            ours, theirs = socket.socketpair()
            # The kernel would end it together with another thread: it looks for this process itself then.
            main = sys.platform.startswith("linux") and threading.get_native_id() == os.getpid()
            words = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid()), str(int(main))]
            try:
                self._process = subprocess.Popen(
                    die_with_parent_command(words) if main else words,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C in a terminal is not for it
                )
            except OSError as error:
                ours.close()
                raise StoreError(
                    f"the process that reads from object stores cannot be started: {error.strerror}. If "
                    "memory or processes are short, use fewer worker processes"
                ) from error
            finally:
                theirs.close()
            self._channel = ours
            settings = self._settings
            told = {
                "directory": settings.directory,
                "limit": settings.limit,
                "timeout": settings.timeout_seconds,
            }
            send(ours, told)
        return self._channel


_connections: dict[CacheSettings, Connection] = {}
_caches: dict[CacheSettings, BlockCache] = {}
_warned: set[str] = set()


def connection(settings: CacheSettings, root: str) -> Connection:
    """The fetcher of this process for a cache.

    Raises:
        DataError: obstore is not installed.
    """
    found = _connections.get(settings)
    if found is None:
        if find_spec("obstore") is None:
            raise DataError(
                f"{root} is an object store, which needs obstore. Install it with `pip install "
                "'dataloader-dispatch[remote]'`."
            )
        found = _connections.setdefault(settings, Connection(settings))
    return found


def list_objects(root: str, prefix: str, settings: CacheSettings) -> list[StoredFile]:
    """All objects below a prefix, at any depth; of the whole bucket if it is empty.

    Raises:
        StoreError: They cannot be listed.
        DataError: obstore is not installed, or the environment holds settings that it does not take.
    """
    answer, _ = connection(settings, root).ask({"do": "list", "root": root, "key": prefix})
    if answer.get("kind") == GONE:
        return []
    if "kind" in answer:
        raise _error(answer)
    return _stored_files(root, answer, settings)


def find_object(root: str, key: str, settings: CacheSettings) -> StoredFile | None:
    """An object; None if it does not exist.

    Raises:
        StoreError: It cannot be looked at.
        DataError: As for `list_objects`.
    """
    answer, _ = connection(settings, root).ask({"do": "head", "root": root, "key": key})
    if answer.get("kind") == GONE:
        return None
    if "kind" in answer:
        raise _error(answer)
    (found,) = _stored_files(root, answer, settings)
    return found


def _stored_files(root: str, answer: Message, settings: CacheSettings) -> list[StoredFile]:
    objects = answer["objects"]
    fits = sum(size for _, size, _, _ in objects) <= settings.limit
    return [
        StoredFile(root, key, size, version, settings, modified, _block_bytes(key, fits))
        for key, size, version, modified in objects
    ]


def _block_bytes(key: str, fits: bool) -> int:
    """Bytes of a block: fewer where documents are small parts of an object that the cache does not keep."""
    return BLOCK_BYTES if fits or not key.lower().endswith(_IN_PARTS) else SMALL_BLOCK_BYTES


def end_fetchers() -> None:
    """End the fetchers of this process; the next read starts one with the environment as it is then."""
    for found in list(_connections.values()):
        found.close()
    _connections.clear()


def _cache(settings: CacheSettings) -> BlockCache | None:
    if not settings.directory:
        return None
    found = _caches.get(settings)
    if found is None:
        found = _caches.setdefault(settings, BlockCache(settings.directory, settings.limit))
    return found


def _warn_once(directory: str, reason: str) -> None:
    if directory not in _warned:
        _warned.add(directory)
        logger.warning(
            "the cache %s cannot be written (%s): what is read from object stores is handed on without it, "
            "and may be fetched again. Make room, or set cache_dir to another directory",
            directory,
            reason,
        )


def _forget_fetchers() -> None:
    """In a forked process: the fetchers are the parent's."""
    for found in _connections.values():
        found.forget()
    _connections.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_fetchers)
atexit.register(end_fetchers)
