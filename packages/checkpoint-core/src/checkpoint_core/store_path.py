"""Places of checkpoints: a directory on a disk, or the address of one in an object store.

A :class:`StorePath` has those methods of ``pathlib.Path`` that look and read, so that what chooses, verifies
and loads checkpoints does not ask where they are. It is not a ``Path``: everything that would write through
the file system, ``open`` and ``Path(...)`` among it, raises instead of writing to a local directory ``s3:``.
"""

import fnmatch
import os
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from checkpoint_core.errors import CheckpointError
from dist_env import (
    STORE_SCHEMES,
    ObjectInfo,
    ObjectStore,
    StoreSettingsError,
    open_object_store,
    split_address,
)

_COLLAPSED = re.compile(r"[a-z][a-z0-9]+:")
DEFAULT_TIMEOUT_SECONDS = 600.0
_READ_BYTES = 4 * 1024 * 1024
STORE_THREADS = 8
"""Requests of one process at a time, with at most 4 MiB each: one request waits most of its time."""

# For the type checker a place is a Path wherever it may be; at run time the two share only what is below.
if TYPE_CHECKING:
    _Base = Path
else:
    _Base = object


class StoreStat(NamedTuple):
    """What a store knows of an object, under the names of ``os.stat_result``."""

    st_size: int
    """Bytes."""
    st_mtime: float
    """When it was written, by the store's clock, in seconds since 1970."""


class StoreReader(Protocol):
    """What reading a file takes of an object store."""

    def head(self, key: str) -> ObjectInfo:
        """Size and time of a file."""

    def get(self, key: str) -> bytes:
        """A whole file."""

    def get_ranges(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Ranges of a file."""


@dataclass(frozen=True, repr=False)
class StorePath(_Base):
    """A place in an object store, such as ``s3://bucket/run/checkpoint-10``."""

    bucket: str
    """Scheme and bucket: ``s3://bucket``, ``memory://name`` or ``file://``."""
    key: str
    """The path in the bucket, without slashes around it."""
    timeout_seconds: float = field(default=DEFAULT_TIMEOUT_SECONDS, compare=False)
    """How long others wait for this process; see :class:`ObjectStore`."""

    def __str__(self) -> str:
        """The address."""
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def __lt__(self, other: PurePath) -> bool:
        """By address."""
        return str(self) < str(other)

    def __repr__(self) -> str:
        """The address, as code."""
        return f"StorePath({str(self)!r})"

    @property
    def store(self) -> ObjectStore:
        """The store, opened at its first use."""
        try:
            return open_object_store(self.bucket, self.timeout_seconds)
        except StoreSettingsError as error:
            raise CheckpointError(str(error)) from None

    @property
    def reader(self) -> StoreReader:
        """What the bytes of this place are read from."""
        return self.store

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        """The place that holds this one."""
        return self._at(self.key.rpartition("/")[0])

    @property
    def parents(self) -> Sequence[Self]:
        """All places above, the nearest first."""
        parts = self.key.split("/")
        return [self._at("/".join(parts[:count])) for count in reversed(range(len(parts)))]

    def __truediv__(self, name: str | os.PathLike[str]) -> Self:
        """A place below."""
        below = os.fspath(name)
        return self._at(f"{self.key}/{below}" if self.key else below)

    def with_name(self, name: str) -> Self:
        """A place beside."""
        return self.parent / name

    def relative_to(self, other: "StorePath") -> PurePosixPath:  # type: ignore[override]
        """The way from a place above to this one."""
        return PurePosixPath(self.key).relative_to(other.key)

    def absolute(self) -> Self:
        """The place itself, which is an address."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """The place itself: stores have no links."""
        return self

    def is_symlink(self) -> bool:
        """False: stores have no links."""
        return False

    def exists(self) -> bool:
        """Whether there is an object here or below."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is an object here."""
        try:
            self.reader.head(self.key)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        directories, objects = self.store.children(self.key)
        # Some stores show an empty folder for a while after its last object was deleted.
        return bool(objects) or any((self / name).is_dir() for name in directories)

    def stat(self) -> StoreStat:  # type: ignore[override]
        """Size and time of the object here."""
        info = self.reader.head(self.key)
        return StoreStat(info.size, info.modified)

    lstat = stat  # type: ignore[assignment]

    def iterdir(self) -> Generator[Self, None, None]:
        """What is right below."""
        directories, objects = self.store.children(self.key)
        for name in directories:
            yield self / name
        for info in objects:
            yield self._at(info.key)

    def glob(self, pattern: str) -> Generator[Self, None, None]:
        """What is right below and has a name of a pattern without a slash."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Generator[Self, None, None]:
        """All objects below, at any depth, that have a name of a pattern."""
        found = (self._at(info.key) for info in self.store.objects(self.key))
        return (path for path in found if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        """The object here."""
        return self.reader.get(self.key)

    def _at(self, key: str) -> Self:
        return type(self)(self.bucket, key, self.timeout_seconds)


def locate(where: str | Path, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Path:
    """A directory on the disk, or a place in an object store.

    Args:
        where: A path, or an address such as ``s3://bucket/run``.
        timeout_seconds: For a store: how long others wait for this process.

    Returns:
        A ``Path``, or a :class:`StorePath`.

    Raises:
        CheckpointError: An address of an unknown scheme, with credentials in it, or given as a ``Path``.
    """
    if isinstance(where, StorePath):
        return where
    if isinstance(where, Path):
        if any(_COLLAPSED.fullmatch(part) and part[:-1] in STORE_SCHEMES for part in where.parts):
            raise CheckpointError(
                f"{str(where)!r} is the Path of an address, which has lost a slash. Give the address as "
                "text, such as 's3://bucket/run'."
            )
        return where
    try:
        address = split_address(text := os.fspath(where))
    except StoreSettingsError as error:
        raise CheckpointError(str(error)) from None
    if address is None:
        return Path(text)
    root, key = address
    if not key:
        raise CheckpointError(
            f"{root} is a whole {'file system' if root == 'file://' else 'bucket'}. Name a place in it, such "
            f"as {root}/run."
        )
    return StorePath(root, key, timeout_seconds)


def store_place(where: str | Path, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> StorePath:
    """A place in an object store, as :func:`locate`, for what works only there.

    Raises:
        CheckpointError: It is a directory.
    """
    place = locate(where, timeout_seconds)
    if not isinstance(place, StorePath):
        raise CheckpointError(
            f"{str(place)!r} is a directory, and must be the address of a place in an object store, such as "
            "'s3://bucket/run'."
        )
    return place


def local_directory(where: str | Path, what: str) -> Path:
    """A directory on the disk, for what does not work in a store.

    Args:
        where: A path.
        what: What needs it, for the message, such as ``a DirectoryLease``.

    Returns:
        The directory.

    Raises:
        CheckpointError: It is an address in a store.
    """
    place = locate(where)
    if isinstance(place, StorePath):
        raise CheckpointError(
            f"{what} needs a directory, but {place} is in an object store. Name a directory."
        )
    return place


class RangeReader:
    """Reads ranges of one file, from several threads. To be closed.

    Args:
        path: A file, or an object of a store.

    Raises:
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.descriptor = None if isinstance(path, StorePath) else os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor is not None:
            os.close(self.descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from an offset on, fewer where the file ends before."""
        if self.descriptor is not None:
            return os.pread(self.descriptor, size, offset)
        buffer = memoryview(bytearray(size))
        return bytes(buffer[: self.fill([(offset, buffer)])])

    def fill(self, targets: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers with the bytes at their offsets.

        Args:
            targets: Offset and buffer of each range.

        Returns:
            The number of bytes, which is smaller where the file ends before.
        """
        if self.descriptor is None:
            return sum(self._fetch(batch) for batch in _batches(targets))
        total = 0
        for offset, rest in targets:
            while rest and (count := os.preadv(self.descriptor, [rest], offset)):
                offset, rest, total = offset + count, rest[count:], total + count
        return total

    def _fetch(self, batch: Sequence[tuple[int, memoryview]]) -> int:
        path = self._path
        assert isinstance(path, StorePath)
        starts, lengths = [offset for offset, _ in batch], [len(buffer) for _, buffer in batch]
        total = 0
        for found, (_, buffer) in zip(path.reader.get_ranges(path.key, starts, lengths), batch, strict=True):
            view = memoryview(found)
            buffer[: len(view)] = view
            total += len(view)
        return total


def _batches(targets: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Ranges of :data:`_READ_BYTES` together at most; larger ones in pieces."""
    batch: list[tuple[int, memoryview]] = []
    filled = 0
    for offset, buffer in targets:
        for begin in range(0, len(buffer), _READ_BYTES):
            piece = buffer[begin : begin + _READ_BYTES]
            if batch and filled + len(piece) > _READ_BYTES:
                yield batch
                batch, filled = [], 0
            batch.append((offset + begin, piece))
            filled += len(piece)
    if batch:
        yield batch


def reading_threads(path: Path, threads: int) -> int:
    """How many threads read: more than the processor has cores where each waits for a network."""
    return max(threads, STORE_THREADS) if isinstance(path, StorePath) else threads


def file_sizes(directory: Path, names: Sequence[str]) -> dict[str, int]:
    """Bytes of those of some files that are there.

    Args:
        directory: Their directory. One in a store is listed once.
        names: Their paths relative to it.

    Returns:
        Sizes by name.
    """
    if isinstance(directory, StorePath):
        skipped = len(directory.key) + 1
        found = {info.key[skipped:]: info.size for info in directory.store.objects(directory.key)}
        return {name: found[name] for name in names if name in found}
    sizes = {}
    for name in names:
        try:
            sizes[name] = (directory / name).stat().st_size
        except FileNotFoundError:
            continue
    return sizes
