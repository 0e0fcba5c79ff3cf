"""Readers of one data file each: whole text files and JSON lines."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.cache import RecentlyUsed
from dataloader_dispatch.sources.unreadable import UnreadableError, os_failure, refuse_changed, refuse_large

_CHUNK = 1 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBED_LINES = 100
_NAMED_KEYS = 20


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
    """A file with one JSON object a line; blank lines are no documents.

    The line starts are kept in a compact array, 8 bytes a document, made by one pass over the file that
    parses nothing. A document is parsed at once, so that a wrong key shows before training starts.
    """

    __slots__ = ("_path", "_recent", "_settings", "_starts")

    def __init__(self, path: str, settings: ReadSettings, recent: RecentFiles) -> None:
        self._path = path
        self._settings = settings
        self._recent = recent
        try:
            # The last entry is the end of the file.
            self._starts = array("Q", _line_starts(path))
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
        try:
            file = self._recent.get(self._path, lambda: (OpenFile(self._path), 0))
            line = file.read(start, stop)
            refuse_changed(self._path, file.size, self._starts[-1])  # it may be written to in place
        except OSError as error:
            raise os_failure(self._path, error) from error
        return self._text_of(decode(line, errors), index, errors)

    def where(self, index: int) -> str:
        """File and line; the line is counted only here, as blank lines make it differ from the index."""
        remaining, number = self._starts[index], 1
        try:
            with open(self._path, "rb") as stream:  # noqa: PTH123
                while remaining and (block := stream.read(min(_CHUNK, remaining))):
                    number += block.count(b"\n")
                    remaining -= len(block)
        except OSError:
            return f"{self._path} document {index}"
        return f"{self._path}:{number}"

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
                f"{self.where(index)}: not valid JSON ({reason}); a .jsonl file holds one JSON object a line"
            ) from error
        if not isinstance(record, dict) or column not in record:
            found = f"the keys {_some(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise UnreadableError(
                f"{self.where(index)}: no key {column!r}; the line holds {found}; name the key of "
                "the text with text_column"
            )
        if twice:
            raise UnreadableError(
                f"{self.where(index)}: the key {column!r} comes twice, and which one is the text cannot be "
                "known; leave one of them out"
            )
        text = record[column]
        if not isinstance(text, str):
            raise UnreadableError(
                f"{self.where(index)}: {column!r} holds {text!r:.40}, which is not a string"
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
        f"{place}: {what}; convert the file, exclude it, or set undecodable to 'skip' or 'replace'"
    )


def _without_surrogates(text: str, errors: str) -> str:
    if errors == "replace":
        return _SURROGATE.sub("\ufffd", text)
    text.encode()
    return text


def _line_starts(path: str) -> Iterator[int]:
    """Where the lines that are not blank start, and the end of the file. Long lines are read in pieces."""
    start = offset = 0
    blank = True
    with open(path, "rb") as stream:  # noqa: PTH123
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
