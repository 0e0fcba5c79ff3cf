"""Documents that lie in files."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.arrow import ArrowReader
from dataloader_dispatch.sources.cache import RecentlyUsed
from dataloader_dispatch.sources.columns import RecentColumns
from dataloader_dispatch.sources.discovery import DataFile, checked_paths, find_data_files
from dataloader_dispatch.sources.parquet import ParquetReader
from dataloader_dispatch.sources.readers import (
    JsonLinesReader,
    NoDocuments,
    Reader,
    ReadSettings,
    RecentFiles,
    TextReader,
    not_text,
)
from dataloader_dispatch.sources.token_binary import TokenBinary, is_token_directory
from dataloader_dispatch.sources.unreadable import UnreadableError

logger = logging.getLogger("dataloader_dispatch")

UndecodablePolicy: TypeAlias = Literal["error", "skip", "replace"]
"""What to do with a document that is not UTF-8; see `open_documents`."""

UnreadablePolicy: TypeAlias = Literal["stop", "skip"]
"""What to do with a file or document that cannot be read; see `open_documents`."""

MAX_DOCUMENT_BYTES = 1 << 30
_RECENT_BYTES = 512 << 20
_RECENT_BLOCKS = 128
_RECENT_FILES = 64


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

    path: str
    name: str
    size: int
    start: int
    stop: int


def open_documents(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    exclude: str | Sequence[str] = (),
    undecodable: UndecodablePolicy = "error",
    text_column: str = "text",
    unreadable: UnreadablePolicy = "stop",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> FileDocuments | TokenBinary:
    """Open files as documents.

    Files ending in ``.txt``, ``.md`` and ``.py`` are one document each, a line of a ``.jsonl`` file is one
    (blank lines are not), and so is a row of a ``.parquet`` or ``.arrow`` file (extra ``arrow``; Arrow IPC in
    the file or the stream format, the latter as Hugging Face ``datasets`` stores it). Text is UTF-8. A column
    of integer lists gives documents that are token ids, int64 tensors of shape [n].

    Nothing but names and sizes is read for text files; documents are read when they are asked for. A
    ``.jsonl`` file is read through once to find its lines, of a ``.parquet`` file the footer is read, of an
    ``.arrow`` file, which is mapped into memory, the heads of its batches. Of a table one column is read.
    The documents have the same order on every machine: by path, and within a directory or glob by file name.

    A directory that ``dataloader-dispatch tokenize`` wrote is opened as `TokenBinary`; it holds token ids,
    so the settings below have no meaning for it.

    Args:
        data: A directory (read with its subdirectories; names with a leading dot, links to directories and
            files with other endings are passed over; a warning tells of links and compressed files), a glob
            (``**`` stands for any directories; it selects files), a file, or a sequence of these.
        exclude: Globs of what to leave out, matched with the path below the directory that was given. ``**``
            stands for any number of directories; a pattern without a slash matches a file or
            directory of that name anywhere. With a directory goes all it holds. Files that ``data`` names
            directly stay.
        undecodable: A document that is not UTF-8, noticed when it is read: ``"error"`` raises with the
            file and the byte; ``"skip"`` makes it an empty document, which `DocumentStream` leaves out;
            ``"replace"`` puts U+FFFD for what cannot be decoded. `FileDocuments.undecodable` counts them.
        text_column: Key (``.jsonl``) or column (``.parquet``, ``.arrow``) that holds the text or token ids.
        unreadable: A file that cannot be opened (it is damaged, not complete, lacks the column, is gone, or
            must not be read), or a document that cannot be read later (that, or it is malformed, or larger
            than allowed): ``"stop"`` raises; ``"skip"`` leaves the file out, or makes the document an empty
            one. `FileDocuments.skipped` tells which; the first of each file is logged as a warning. A JSON
            lines file none of whose first 100 documents can be read counts as one that cannot be
            opened. What this process has run out of (memory, open files) is never skipped.
        max_document_bytes: Size of the largest document to read, at least 1. A larger one cannot be read. Its
            size is known before it is read; of a JSON line, that of the whole line counts. A Parquet row
            is measured after its row group is read.

    Returns:
        The documents.

    Raises:
        DataError: A path does not exist, cannot be read, is no path, or holds no data file; a file is named
            twice; there are only empty files; a first line is malformed; a column is missing or holds neither
            text nor token ids; pyarrow is needed but not installed; a setting is out of range; a directory
            of token ids is damaged, not finished, or one of several paths.
    """
    _check_choice("undecodable", undecodable, get_args(UndecodablePolicy))
    _check_choice("unreadable", unreadable, get_args(UnreadablePolicy))
    if (
        isinstance(max_document_bytes, bool)
        or not isinstance(max_document_bytes, int)
        or max_document_bytes < 1
    ):
        raise DataError(
            f"max_document_bytes={max_document_bytes!r} is out of range; it must be an integer of at least 1"
        )
    paths = checked_paths(data)
    for path in paths:
        if is_token_directory(path):
            if len(paths) == 1:
                return TokenBinary(path)
            raise DataError(
                f"data path {path} holds token ids, and cannot be opened together with other "
                "paths; open each by itself and mix them with mix_documents"
            )
    files = find_data_files(paths, exclude)
    settings = ReadSettings(text_column, max_document_bytes, skip=unreadable == "skip")
    return FileDocuments(files, undecodable, settings)


class FileDocuments:
    """The documents of a list of files; made by `open_documents`.

    Copies for other processes are as small as the list of files and, for JSON lines, 8 bytes a document.
    Several processes may read at once.
    """

    def __init__(
        self, files: Sequence[DataFile], undecodable: UndecodablePolicy, settings: ReadSettings
    ) -> None:
        self._files = files
        self._policy = undecodable
        self._settings = settings
        self._undecodable: set[int] = set()
        self._unreadable: set[int] = set()
        self._skipped: dict[int, SkippedFile] = {}
        columns: RecentColumns = RecentlyUsed(_RECENT_BYTES, _RECENT_BLOCKS)
        lines: RecentFiles = RecentlyUsed(0, _RECENT_FILES)
        self._readers = [self._open(number, columns, lines) for number in range(len(files))]
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
        number, place = self._locate(index)
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
        number, place = self._locate(index)
        return self._readers[number].where(place)

    def fingerprint(self) -> str:
        """Digest of relative names, sizes and numbers of documents, and of the text column.

        A file left out when the data were opened makes a difference. How documents are treated that turn out
        undecodable or unreadable does not: under "error" and "stop" none has been delivered, so a run that
        met one can go on with another choice.
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
            FileRange(file.path, file.name, file.size, self._starts[number], self._starts[number + 1])
            for number, file in enumerate(self._files)
        ]

    def _open(self, number: int, columns: RecentColumns, lines: RecentFiles) -> Reader:
        file = self._files[number]
        try:
            if file.problem:
                raise UnreadableError(file.problem)
            return _reader(file, self._settings, columns, lines)
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
            raise DataError(f"none of the {len(self._files)} file(s) can be read; the first: {first}")
        if not len(self) or not any(file.size for file in self._files):
            first = self._files[0].path if self._files else "none"
            raise DataError(
                f"the data hold no text: {len(self._files)} file(s), all of them empty (the first: {first})"
            )

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the file, and of the document in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} is outside a source of {len(self)} documents")
        # Files without documents repeat a start; the last of equal starts is the file that has some.
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DataError(f"{name}={value!r} is unknown; choose one of {choices}")


def _reader(file: DataFile, settings: ReadSettings, columns: RecentColumns, lines: RecentFiles) -> Reader:
    path, name = file.path, file.path.lower()
    if name.endswith(".jsonl"):
        return JsonLinesReader(path, settings, lines)
    if name.endswith(".parquet"):
        return ParquetReader(path, settings, columns)
    if name.endswith(".arrow"):
        return ArrowReader(path, settings, columns)
    return TextReader(path, file.size, settings)
