"""Readers of one data file each: whole text files and JSON lines."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Protocol

from dataloader_dispatch.errors import DataError

_CHUNK = 1 << 20


class Reader(Protocol):
    """Random access to the documents of one file. A reader keeps no file open."""

    @property
    def count(self) -> int:
        """Number of documents."""
        ...

    def read(self, index: int, errors: str) -> str:
        """Document ``index`` of the file; ``errors`` is that of `bytes.decode`, which may raise."""
        ...

    def where(self, index: int) -> str:
        """The document's place in words, for messages."""
        ...


class TextReader:
    """A file that is one document."""

    __slots__ = ("_path",)
    count = 1

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, index: int, errors: str) -> str:
        try:
            with open(self._path, "rb") as stream:  # noqa: PTH123  (called once a document)
                return decode(stream.read(), errors)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def where(self, index: int) -> str:
        return self._path


class JsonLinesReader:
    """A file with one JSON object a line; blank lines are no documents.

    The line starts are kept in a compact array, 8 bytes a document, made by one pass over the file that
    parses nothing. The first document is parsed at once, so that a wrong key shows before training starts.
    """

    __slots__ = ("_path", "_starts", "_text_column")

    def __init__(self, path: str, text_column: str) -> None:
        self._path = path
        self._text_column = text_column
        try:
            self._starts = array("Q", _line_starts(path))
        except OSError as error:
            raise unreadable(path, error) from error
        if self._starts:
            self.read(0, "replace")

    @property
    def count(self) -> int:
        return len(self._starts)

    def read(self, index: int, errors: str) -> str:
        try:
            with open(self._path, "rb") as stream:  # noqa: PTH123  (called once a document)
                stream.seek(self._starts[index])
                line = stream.readline()
        except OSError as error:
            raise unreadable(self._path, error) from error
        return self._text_of(decode(line, errors), index)

    def where(self, index: int) -> str:
        """File and line; the line is counted only here, as blank lines make it differ from the index."""
        remaining, number = self._starts[index], 1
        with open(self._path, "rb") as stream:  # noqa: PTH123
            while remaining and (block := stream.read(min(_CHUNK, remaining))):
                number += block.count(b"\n")
                remaining -= len(block)
        return f"{self._path}:{number}"

    def _text_of(self, line: str, index: int) -> str:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.where(index)}: not valid JSON ({error.msg}, column {error.colno}); a .jsonl file "
                "holds one JSON object a line"
            ) from error
        if not isinstance(record, dict) or self._text_column not in record:
            found = f"the keys {sorted(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(
                f"{self.where(index)}: no key {self._text_column!r}; the line holds {found}; name the key of "
                "the text with text_column"
            )
        text = record[self._text_column]
        if not isinstance(text, str):
            raise DataError(
                f"{self.where(index)}: {self._text_column!r} holds {text!r:.40}, which is not a string"
            )
        return text


def decode(raw: bytes, errors: str) -> str:
    """UTF-8 text without a leading byte order mark. Line ends stay as they are.

    Raises:
        UnicodeDecodeError: ``errors`` is "strict" and the bytes are not UTF-8.
    """
    return raw.decode("utf-8", errors).removeprefix("\ufeff")


def unreadable(path: str, error: OSError) -> DataError:
    """The error for a file that the system will not read."""
    return DataError(f"cannot read the data file {path}: {error.strerror or error}")


def _line_starts(path: str) -> Iterator[int]:
    offset = 0
    with open(path, "rb") as stream:  # noqa: PTH123
        for line in stream:
            if not line.isspace():
                yield offset
            offset += len(line)
