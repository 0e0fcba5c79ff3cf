"""Durable files: written once, checksummed on the way, synced to the disk, and verified by reading back.

The checksum is the CRC-32C of a file that several ranks write. A CRC is linear: that of a file is the
exclusive or of the CRCs of its pieces, each moved to its place by a multiplication in GF(2)[x] modulo the
Castagnoli polynomial. So every rank reports one number for each file, whatever it wrote of it, and nobody
reads the file back. The polynomial and bit order are those of RFC 3720 (iSCSI), appendix B.4.
"""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from operator import xor
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from crc32c import crc32c

from checkpoint_core.errors import CheckpointError
from checkpoint_core.store_path import RangeReader, StorePath

ALGORITHM = "crc32c"
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
CHUNK_BYTES = 512 * 1024
"""Largest piece moved at once; its checksum is taken while it is still in the processor's cache."""
STORE_CHUNK_BYTES = 4 * 1024 * 1024
"""The same for a store, where each piece is a request."""
MAX_NESTING = 320
"""Levels of a JSON document that is read: three for each of the hundred of a state that can be saved, so that
what walks through it has room on Python's stack."""


class PartialDigest:
    """The share of one writer in the CRC-32C of a file; pieces come in ascending order of offset."""

    def __init__(self) -> None:
        self._value = 0
        self._position = 0

    def update(self, offset: int, data: bytes | memoryview) -> None:
        """Take in the bytes at an offset.

        Args:
            offset: Where in the file they lie, not before the end of the previous piece.
            data: The bytes, contiguous.
        """
        if offset != self._position:
            self._value = _shift(self._value, offset - self._position)
        self._value = crc32c(data, self._value)
        self._position = offset + len(data)

    def share(self, size: int) -> int:
        """The contribution to the checksum of the whole file.

        Args:
            size: Bytes of the whole file.

        Returns:
            A 32-bit number. The exclusive or of the shares of all writers is the file's CRC-32C.
        """
        return _shift(self._value, size - self._position)


def combine(shares: Iterable[int]) -> str:
    """The checksum of a file.

    Args:
        shares: What each writer of the file contributed; together they cover every byte once.

    Returns:
        CRC-32C as 8 hexadecimal digits.
    """
    return f"{reduce(xor, shares, 0):08x}"


def digest(data: bytes) -> str:
    """The checksum of a few bytes: CRC-32C as 8 hexadecimal digits."""
    return f"{crc32c(data):08x}"


def _shift(crc: int, count: int) -> int:
    """The CRC of what ``crc`` stands for, moved left by ``count`` bytes that belong to others."""
    return _multiply(_power(count), crc) if crc else 0


@lru_cache(maxsize=4096)
def _power(count: int) -> int:
    """``x`` to the power ``8 * count``, modulo the polynomial."""
    if count == 0:
        return _ONE
    half = _power(count // 2)
    square = _multiply(half, half)
    return _multiply(square, _ONE >> 8) if count % 2 else square


def _multiply(left: int, right: int) -> int:
    """Product of two polynomials modulo the Castagnoli one; the highest bit is the constant term."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of one file."""

    size: int
    """Bytes."""
    checksum: str
    """CRC-32C of the content, 8 hexadecimal digits."""


def json_bytes(document: object) -> bytes:
    """A JSON document as the bytes of a file: UTF-8, indented, strict (no NaN tokens).

    Args:
        document: A tree of dict, list, str, int, finite float, bool and None.

    Returns:
        The bytes, ending in a newline.
    """
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode("ascii")


def create_file(path: Path) -> int:
    """Make a new file.

    Args:
        path: The file.

    Returns:
        A descriptor for writing.

    Raises:
        CheckpointError: Another writer already made the file.
        OSError: The operating system refused; the error carries the file's name.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError as error:
        raise CheckpointError(
            f"two parts of the checkpoint want to write {path.name}. Rename the component key that clashes "
            "with another component or with a file of the preprocessor."
        ) from error


def write_at(
    descriptor: int, data: bytes | memoryview, offset: int, path: Path, digest: PartialDigest
) -> None:
    """Write bytes to their place in a file and take them into a digest.

    Args:
        descriptor: The open file.
        data: The bytes, contiguous.
        offset: Their place in the file.
        path: The file's name, for messages.
        digest: Takes in what was written.

    Raises:
        OSError: The disk is full or failed; the error carries the file's name.
    """
    rest = memoryview(data)
    while rest:
        try:
            count = os.pwrite(descriptor, rest[:CHUNK_BYTES], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        digest.update(offset, rest[:count])
        offset += count
        rest = rest[count:]


def write_bytes(path: Path, data: bytes) -> int:
    """Write a small file durably.

    Args:
        path: Where; the file must not exist.
        data: Its content.

    Returns:
        Its CRC-32C.
    """
    digest = PartialDigest()
    descriptor = create_file(path)
    try:
        write_at(descriptor, data, 0, path, digest)
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)
    return digest.share(len(data))


def read_json(path: Path) -> object:
    """Read a JSON file.

    Args:
        path: The file.

    Returns:
        The document.

    Raises:
        CheckpointError: The file is not JSON.
        OSError: The file cannot be read.
    """
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Restore the file.") from error


def parse_json_object(text: bytes) -> dict[str, Any]:
    """Read a JSON document as :func:`parse_json`, which must be an object.

    Raises:
        ValueError: It is something else; says what.
    """
    document = parse_json(text)
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    return document


def parse_json(text: bytes) -> object:
    """Read a JSON document strictly: no NaN tokens, no key twice, no number beyond the floats, no nesting
    that Python's stack has no room for.

    Args:
        text: The document.

    Returns:
        A tree of dict, list, str, int, finite float, bool and None.

    Raises:
        ValueError: It is something else; says what.
    """
    too_deep = ValueError(f"it is nested deeper than {MAX_NESTING} levels")
    try:
        document = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_repeats
        )
    except RecursionError as error:
        raise too_deep from error
    level: list[object] = [document]
    for _ in range(MAX_NESTING):
        containers = [node.values() if isinstance(node, dict) else node for node in level if _holds(node)]
        level = [child for container in containers for child in container]
        if not level:
            return document
    raise too_deep


def _holds(node: object) -> TypeGuard[dict[str, object] | list[object]]:
    return isinstance(node, (dict, list))


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"it holds {text[:40]}, which is beyond the largest float")
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {repeated!r} twice in one object")
    return found


def checksum_file(path: Path) -> FileRecord:
    """Read a file from end to end.

    Args:
        path: The file.

    Returns:
        Its size and checksum.
    """
    size = path.stat().st_size
    return FileRecord(size, combine([range_share(path, 0, size, size)]))


def range_share(path: Path, begin: int, end: int, size: int) -> int:
    """Read a range of a file and tell what it contributes to the file's checksum.

    Args:
        path: The file.
        begin: Offset of the first byte.
        end: Offset behind the last byte.
        size: Bytes of the whole file.

    Returns:
        A share for :func:`combine`. A file that ends early gives the share
        of what there is, which does not fit.
    """
    digest = PartialDigest()
    chunk = STORE_CHUNK_BYTES if isinstance(path, StorePath) else CHUNK_BYTES
    buffer = memoryview(bytearray(min(chunk, end - begin)))
    with closing(RangeReader(path)) as file:
        while begin < end and (count := file.fill([(begin, buffer[: end - begin])])):
            digest.update(begin, buffer[:count])
            begin += count
    return digest.share(size)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """Force an open file to the disk.

    Args:
        descriptor: The open file.
        path: Its name, for messages.

    Raises:
        OSError: The disk is full or failed; the error carries the file's name.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_file(path: Path) -> None:
    """Force a file or directory that something else wrote to the disk.

    Args:
        path: The file or directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def sync_directories(root: Path) -> None:
    """Force the entries of a directory and of everything below it to the disk.

    Args:
        root: The directory.
    """
    for path in root.rglob("*"):
        if path.is_dir():
            sync_file(path)
    sync_file(root)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class InterruptSafeEvent:
    """A ``threading.Event`` that is set once, and that Ctrl-C leaves intact at any point of waiting.

    An interrupt may leave the lock inside ``threading.Event`` taken. ``Thread.join`` does not serve either:
    on Python 3.11 and 3.12 a join that Ctrl-C interrupts marks the living thread as ended, so that neither a
    later join nor the end of the interpreter waits for it (python/cpython issue 90882).
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """To be called once; never blocks."""
        self._is_set = True
        self._lock.release()

    def wait(self) -> None:
        """Block until it is set. May be interrupted by Ctrl-C at any point, and called again."""
        if not self._is_set:
            with self._lock:
                return


def in_threads(
    threads: int, items: Sequence[_Item], action: Callable[[Sequence[_Item]], _Result]
) -> list[_Result]:
    """Divide items among threads, in order.

    ``concurrent.futures`` refuses work once the interpreter is about to exit, which is just when the last
    asynchronous save is written; plain threads do not.

    Args:
        threads: How many threads at most, this one included.
        items: What to divide.
        action: Called once for each consecutive group of items.

    Returns:
        The result for each group.

    Raises:
        BaseException: The first failure of any group, after all have ended.
    """
    count = max(min(threads, len(items)), 1)
    bounds = [len(items) * number // count for number in range(count + 1)]
    groups = [items[begin:end] for begin, end in pairwise(bounds)]
    results: dict[int, _Result] = {}
    failures: list[BaseException] = []
    ended = [InterruptSafeEvent() for _ in range(1, count)]

    def run(number: int) -> None:
        try:
            results[number] = action(groups[number])
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread below
            failures.append(error)
        finally:
            if number:
                ended[number - 1].set()

    helpers = [threading.Thread(target=run, args=(number,)) for number in range(1, count)]
    started = 0
    try:
        for helper in helpers:
            helper.start()
            started += 1
        run(0)
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread uses the file any more
        failures.append(error)
    for event in ended[:started]:
        _wait(event, failures)
    if failures:
        raise failures[0]
    return [results[number] for number in range(count)]


def _wait(event: InterruptSafeEvent, interruptions: list[BaseException]) -> None:
    """Wait to the end: Ctrl-C must not leave a thread writing to a file that is closed by then."""
    while True:
        try:
            return event.wait()
        except BaseException as error:  # noqa: BLE001 - raised by the caller once nothing runs any more
            interruptions.append(error)
