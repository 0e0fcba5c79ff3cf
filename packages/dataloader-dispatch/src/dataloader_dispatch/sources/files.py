"""Documents that lie in files: text files, JSON lines, and what is done with unreadable ones."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from dataloader_dispatch.documents import locate
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.store.reader import StoredFile, announce
from dist_env import StoreError

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")

logger = logging.getLogger("dataloader_dispatch")

UndecodablePolicy: TypeAlias = Literal["error", "skip", "replace"]
"""What to do with a document that is not UTF-8; see `open_documents`."""

_EXHAUSTED = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n), or use fewer worker processes.",
    errno.ENFILE: "The whole machine has too many files open. Close some, or raise the limit.",
    errno.ENOMEM: "Free memory, or use fewer worker processes.",
}
_CHUNK = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBED_LINES = 100
_NAMED_KEYS = 20


class UnreadableError(DataError):
    """A file or document is at fault. With ``unreadable="skip"`` it is left out and counted."""


def os_failure(path: str, error: OSError) -> DataError:
    """The error for a file that the system will not read.

    What a process has run out of says nothing about the file, so that is not an `UnreadableError`: the file
    must not be left out for it.
    """
    remedy = _EXHAUSTED.get(error.errno or 0)
    text = f"cannot read the data file {path}: {error.strerror or error}"
    return DataError(f"{text}. {remedy}") if remedy else UnreadableError(f"{text}.")


def refuse_changed(path: str, size: int, expected: int) -> None:
    """Refuse a file whose size is another than when it was opened: its documents are not those of then.

    Raises:
        UnreadableError: The sizes differ.
    """
    if size != expected:
        raise UnreadableError(
            f"{path} has {size} bytes, but had {expected} when it was opened, so it was changed in the "
            "meantime. Open the data again, or put the file back as it was."
        )


def refuse_large(place: str, size: int, limit: int) -> None:
    """Refuse a document that is larger than ``max_document_bytes``.

    Args:
        place: The document in words.
        size: Its bytes.
        limit: The setting.

    Raises:
        UnreadableError: It is larger.
    """
    if size > limit:
        raise UnreadableError(
            f"{place} has {size} bytes, more than max_document_bytes={limit}. Split it, raise "
            "max_document_bytes if memory allows, or leave such documents out with unreadable='skip'."
        )


class RecentlyUsed(Generic[Value]):
    """Values by key; those used longest ago go first. Copies for other processes start empty.

    There is no lock, as a lock that some thread holds while the process forks is never released in the child.
    Every step on the dict is atomic, and two threads that miss the same key both load it.

    Args:
        max_bytes: Memory that all values may take together, by what `get` is told. The newest one is always
            kept.
        max_entries: Number of values, which bounds the files that are held open.
    """

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._kept: dict[Hashable, tuple[Value, int]] = {}

    def get(self, key: Hashable, load: Callable[[], tuple[Value, int]]) -> Value:
        """The value of a key.

        Args:
            key: The key.
            load: Makes the value if it is not kept; gives it with the bytes of memory it takes.
        """
        entry = self._kept.pop(key, None)
        if entry is None:
            entry = load()
            self._make_room(entry[1])
        self._kept[key] = entry
        return entry[0]

    def __reduce__(self) -> tuple[type[RecentlyUsed[Value]], tuple[int, int]]:
        return type(self), (self._max_bytes, self._max_entries)

    def _make_room(self, size: int) -> None:
        kept = list(self._kept.items())
        total = size + sum(cost for _, (_, cost) in kept)
        for number, (key, (_, cost)) in enumerate(kept):
            if total <= self._max_bytes and len(kept) - number < self._max_entries:
                return
            self._kept.pop(key, None)
            total -= cost


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What all readers of a source follow.

    Attributes:
        text_column: Key or column that holds the text or the token ids.
        max_document_bytes: Size of the largest document that is read.
        skip: Whether what cannot be read is left out.
    """

    text_column: str
    max_document_bytes: int
    skip: bool


class Reader(Protocol):
    """Random access to the documents of one file. Copies for other processes hold no open file."""

    @property
    def count(self) -> int:
        """Number of documents."""
        ...

    def read(self, index: int, errors: str) -> str | torch.Tensor:
        """Document ``index`` of the file; ``errors`` is that of `bytes.decode`, which may raise."""
        ...

    def where(self, index: int) -> str:
        """The document's place in words, for messages."""
        ...


class NoDocuments:
    """Stands for a file that is left out."""

    __slots__ = ("_path",)
    count = 0

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, index: int, errors: str) -> str:
        raise IndexError(index)

    def where(self, index: int) -> str:
        return self._path


class TextReader:
    """A file that is one document."""

    __slots__ = ("_path", "_settings", "_size")
    count = 1

    def __init__(self, path: str, size: int, settings: ReadSettings) -> None:
        self._path = path
        self._size = size
        self._settings = settings

    def read(self, index: int, errors: str) -> str:
        try:
            with open(self._path, "rb") as stream:  # noqa: PTH123  (called once a document)
                refuse_large(self._path, os.fstat(stream.fileno()).st_size, self._settings.max_document_bytes)
                raw = stream.read()
        except OSError as error:
            raise os_failure(self._path, error) from error
        refuse_changed(self._path, len(raw), self._size)
        return decode(raw, errors)

    def where(self, index: int) -> str:
        return self._path


class OpenFile:
    """A file that is read at any place. Processes that share it after a fork do not disturb one another."""

    __slots__ = ("_handle",)

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDONLY)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._handle).st_size

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` up to, not including, ``stop``; fewer at the end of the file."""
        pieces = []
        while start < stop and (piece := os.pread(self._handle, stop - start, start)):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)  # none if opening failed
        if handle is not None:
            os.close(handle)


RecentFiles: TypeAlias = RecentlyUsed[OpenFile]


class JsonLinesReader:
    """A file with one JSON object a line; blank lines are not documents.

    The line starts are kept in a compact array, 8 bytes a document, made by one pass over the file that
    parses nothing. A document is parsed at once, so that a wrong key shows before training starts.
    """

    __slots__ = ("_path", "_recent", "_settings", "_starts")

    def __init__(self, path: str, settings: ReadSettings, recent: RecentFiles) -> None:
        self._path = path
        self._settings = settings
        self._recent = recent
        try:
            with self._stream() as stream:
                # The last entry is the end of the file.
                self._starts = array("Q", _line_starts(stream))
        except StoreError:
            raise
        except OSError as error:
            raise os_failure(path, error) from error
        self._probe()

    @property
    def count(self) -> int:
        return len(self._starts) - 1

    def read(self, index: int, errors: str) -> str:
        start, stop = self._starts[index], self._starts[index + 1]
        # Blank lines behind it are part of this span, and next to nothing.
        if stop - start > self._settings.max_document_bytes:
            refuse_large(self.where(index), stop - start, self._settings.max_document_bytes)
        return self._text_of(decode(self._line(start, stop), errors), index, errors)

    def where(self, index: int) -> str:
        """File and line; the line is counted only here, as blank lines make it differ from the index."""
        remaining, number = self._starts[index], 1
        try:
            with self._stream() as stream:
                while remaining and (block := stream.read(min(_CHUNK, remaining))):
                    number += block.count(b"\n")
                    remaining -= len(block)
        except (OSError, UnreadableError):
            return f"{self._path} document {index}"
        return f"{self._path}:{number}"

    def _stream(self) -> AbstractContextManager[BinaryIO]:
        return open(self._path, "rb")  # noqa: PTH123

    def _line(self, start: int, stop: int) -> bytes:
        try:
            file = self._recent.get(self._path, lambda: (OpenFile(self._path), 0))
            line = file.read(start, stop)
            refuse_changed(self._path, file.size, self._starts[-1])  # it may be written to in place
        except OSError as error:
            raise os_failure(self._path, error) from error
        return line

    def _probe(self) -> None:
        """Refuse a file without a readable document, as with a wrong key, or with a bad first one."""
        first: UnreadableError | None = None
        for index in range(min(self.count, _PROBED_LINES)):
            try:
                self.read(index, "replace")
            except UnreadableError as error:
                first = first or error
                if not self._settings.skip:
                    break
            else:
                return
        if first is not None:
            raise first

    def _text_of(self, line: str, index: int, errors: str) -> str:
        column = self._settings.text_column
        try:
            record = json.loads(line)
            # Of equal keys the last one would win. Few lines need a second look.
            again = line.count(f'"{column}"') > 1 or "\\u" in line
            twice = again and _outermost_keys(line).count(column) > 1
        except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            raise UnreadableError(
                f"{self.where(index)}: not valid JSON ({reason}). A .jsonl file holds one JSON object a line."
            ) from error
        if not isinstance(record, dict) or column not in record:
            found = f"the keys {_some(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise UnreadableError(
                f"{self.where(index)}: no key {column!r}, but {found}. Name the key of the text with "
                "text_column."
            )
        if twice:
            raise UnreadableError(
                f"{self.where(index)}: the key {column!r} comes twice, and which one is the text cannot be "
                "known. Leave one of them out."
            )
        text = record[column]
        if not isinstance(text, str):
            raise UnreadableError(
                f"{self.where(index)}: {column!r} holds {text!r:.40}, which is not a string."
            )
        # Only an escape such as \ud800 can give half of a surrogate pair.
        return _without_surrogates(text, errors) if "\\u" in line else text


def _outermost_keys(line: str) -> list[str]:
    """The keys of a JSON object, equal ones included."""
    found: list[str] = []

    def keep(pairs: list[tuple[str, object]]) -> None:
        found[:] = [key for key, _ in pairs]  # the outermost object comes last

    json.loads(line, object_pairs_hook=keep)
    return found


def _some(keys: Iterable[str]) -> str:
    """Keys for a message, the first of them if they are many."""
    names = sorted(keys)
    return str(names) if len(names) <= _NAMED_KEYS else f"{names[:_NAMED_KEYS]} and more, {len(names)} in all"


def decode(raw: bytes, errors: str) -> str:
    """UTF-8 text without a leading byte order mark. Line ends stay as they are.

    Raises:
        UnicodeDecodeError: ``errors`` is "strict" and the bytes are not UTF-8.
    """
    return raw.decode("utf-8", errors).removeprefix("\ufeff")


def not_text(place: str, error: UnicodeError) -> DataError:
    """The error for a document that is not UTF-8, or could not be written as UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        what = f"not UTF-8 at byte {error.start}, which is 0x{error.object[error.start]:02x}"
    else:
        what = f"not text: {error}"
    return DataError(
        f"{place}: {what}. Convert the file, exclude it, or set undecodable to 'skip' or 'replace'."
    )


def _without_surrogates(text: str, errors: str) -> str:
    if errors == "replace":
        return _SURROGATE.sub("\ufffd", text)
    text.encode()
    return text


def _line_starts(stream: BinaryIO) -> Iterator[int]:
    """Where the lines that are not blank start, and the end of the file. Long lines are read in pieces."""
    start = offset = 0
    blank = True
    while piece := stream.readline(_CHUNK):
        blank = blank and piece.isspace()
        offset += len(piece)
        if piece.endswith(b"\n"):
            if not blank:
                yield start
            start, blank = offset, True
    if not blank:
        yield start
    yield offset


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was found.

    Attributes:
        path: Where it lies.
        name: Its path below the directory that was given, with forward slashes.
        size: Bytes, as far as they are known.
        problem: Why it cannot be read; empty if nothing speaks against it.
        stored: The object, if it is one of a store; ``path`` is its address then.
    """

    path: str
    name: str
    size: int
    problem: str = ""
    stored: StoredFile | None = None


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """What was left out of a file under ``unreadable="skip"``.

    Attributes:
        reason: What was wrong, the first time.
        whole: The file was left out when the data were opened, with all it may hold.
        documents: Number of different documents left out so far, in this process; 0 for a whole file.
    """

    reason: str
    whole: bool
    documents: int


class FileRange(NamedTuple):
    """The documents of one file: numbers ``start`` up to, not including, ``stop``."""

    file: DataFile
    start: int
    stop: int


class FileDocuments:
    """The documents of a list of files; made by `open_documents`.

    Copies for other processes are as small as the list of files and, for JSON lines, 8 bytes a document.
    Several processes may read at once.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        undecodable: UndecodablePolicy,
        settings: ReadSettings,
        open_reader: Callable[[DataFile], Reader],
    ) -> None:
        self._files = files
        self._policy = undecodable
        self._settings = settings
        self._undecodable: set[int] = set()
        self._unreadable: set[int] = set()
        self._skipped: dict[int, SkippedFile] = {}
        self._stored = any(file.stored is not None for file in files)
        self._readers = [self._open(number, open_reader) for number in range(len(files))]
        self._starts = array("Q", [0])
        for reader in self._readers:
            self._starts.append(self._starts[-1] + reader.count)
        self._refuse_nothing()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> str | torch.Tensor:
        """A document: its text, or its token ids as an int64 tensor of shape [n].

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The document cannot be read, is malformed, is larger than ``max_document_bytes``, or is
                not UTF-8, where the settings do not leave it out. The message names the file, and the line
                or row.
        """
        number, place = locate(self._starts, index)
        reader = self._readers[number]
        try:
            return reader.read(place, "strict")
        except UnicodeError as error:
            if self._policy == "error":
                raise not_text(reader.where(place), error) from error
            self._undecodable.add(index)
            return "" if self._policy == "skip" else reader.read(place, "replace")
        except UnreadableError as error:
            if not self._settings.skip:
                raise
            if index not in self._unreadable:
                self._unreadable.add(index)
                self._count_skipped(number, str(error), whole=False)
            return ""

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Tells which documents are read soon, in order; None for files on a disk, which the system reads.

        Objects of a store are fetched ahead then. What is read does not depend on it.
        """
        return self._read_ahead if self._stored else None

    def _read_ahead(self, indices: Sequence[int]) -> None:
        spans = []
        for index in indices:
            number, place = locate(self._starts, index)
            span = getattr(self._readers[number], "span", None)
            if span is not None:
                spans.append(span(place))
        announce(spans)

    @property
    def undecodable(self) -> int:
        """Number of different documents met so far, in this process, that are not UTF-8."""
        return len(self._undecodable)

    @property
    def skipped(self) -> dict[str, SkippedFile]:
        """What ``unreadable="skip"`` left out, by path of the file.

        Whole files are known from the start; documents are those met so far, in this process.
        """
        return {self._files[number].path: skipped for number, skipped in self._skipped.items()}

    @property
    def files(self) -> int:
        """Number of files, those left out included."""
        return len(self._files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def where(self, index: int) -> str:
        """The place of a document in words: file, and line or row."""
        number, place = locate(self._starts, index)
        return self._readers[number].where(place)

    def fingerprint(self) -> str:
        """Digest of relative names, sizes and numbers of documents, and of the text column.

        A file left out when the data were opened makes a difference. How documents are treated that turn out
        undecodable or unreadable does not: under "error" and "stop" none has been delivered, so a run that
        met one can continue with another choice.
        """
        digest = hashlib.sha256(f"{len(self)} documents {self._settings.text_column!r}\n".encode())
        for number, (file, reader) in enumerate(zip(self._files, self._readers, strict=True)):
            skipped = self._skipped.get(number)
            count = "unreadable" if skipped and skipped.whole else reader.count
            digest.update(f"{file.name!r} {file.size} {count}\n".encode())
        return digest.hexdigest()

    def ranges(self) -> list[FileRange]:
        """Which documents lie in which file; in order, files without documents included."""
        return [
            FileRange(file, self._starts[number], self._starts[number + 1])
            for number, file in enumerate(self._files)
        ]

    def _open(self, number: int, open_reader: Callable[[DataFile], Reader]) -> Reader:
        file = self._files[number]
        try:
            if file.problem:
                raise UnreadableError(file.problem)
            return open_reader(file)
        except UnreadableError as error:
            if not self._settings.skip:
                raise
            self._count_skipped(number, str(error), whole=True)
            return NoDocuments(file.path)

    def _count_skipped(self, number: int, reason: str, whole: bool) -> None:
        before = self._skipped.get(number)
        if before is None:
            what = "file" if whole else "document"
            logger.warning("left out a %s, as unreadable='skip' says: %s", what, reason)
            before = SkippedFile(reason, whole, 0)
        self._skipped[number] = replace(before, documents=before.documents + (not whole))

    def _refuse_nothing(self) -> None:
        if self._files and len(self._skipped) == len(self._files):
            first = self._skipped[0].reason
            raise DataError(f"none of the {len(self._files)} file(s) can be read. The first: {first}")
        if not len(self) or not any(file.size for file in self._files):
            first = self._files[0].path if self._files else "none"
            raise DataError(
                f"the data hold no text: {len(self._files)} file(s), all of them empty (the first: {first})."
            )
