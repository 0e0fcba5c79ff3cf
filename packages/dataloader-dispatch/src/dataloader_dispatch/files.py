"""Documents that lie in files."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from dataloader_dispatch.discovery import DataFile, find_data_files
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.parquet import ParquetReader
from dataloader_dispatch.readers import JsonLinesReader, Reader, TextReader

UndecodablePolicy: TypeAlias = Literal["error", "skip", "replace"]
"""What to do with a document that is not UTF-8; see `open_documents`."""


def open_documents(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    exclude: str | Sequence[str] = (),
    undecodable: UndecodablePolicy = "error",
    text_column: str = "text",
) -> FileDocuments:
    """Open text files as documents.

    Files ending in ``.txt``, ``.md`` and ``.py`` are one document each, a line of a ``.jsonl`` file is one
    (blank lines are not), and so is a row of a ``.parquet`` file (extra ``arrow``). Text is UTF-8.

    Nothing but names and sizes is read for text files; documents are read when they are asked for. A
    ``.jsonl`` file is read through once to find its lines, of a ``.parquet`` file the footer is read.
    The documents have the same order on every machine: by path, and within a directory or glob by file name.

    Args:
        data: A directory (read with its subdirectories; names with a leading dot, links to directories and
            files with other endings are passed over), a glob (``**`` stands for any directories; it
            selects files), a file, or a sequence of these.
        exclude: Globs of what to leave out, matched with the path below the directory that was given. ``**``
            stands for any number of directories; a pattern without a slash matches a file or
            directory of that name anywhere. With a directory goes all it holds. Files that ``data`` names
            directly stay.
        undecodable: A document that is not UTF-8, noticed when it is read: ``"error"`` raises with the
            file and the byte; ``"skip"`` makes it an empty document, which `PackedDocuments` leaves out;
            ``"replace"`` puts U+FFFD for what cannot be decoded. `FileDocuments.undecodable` counts them.
        text_column: Key (``.jsonl``) or column (``.parquet``) that holds the text.

    Returns:
        The documents.

    Raises:
        DataError: A path does not exist, cannot be read, or holds no data file; a file is named
            twice; there are only empty files; a first line is malformed; a column is missing; pyarrow is
            needed but not installed; ``undecodable`` is none of the three.
    """
    if undecodable not in get_args(UndecodablePolicy):
        raise DataError(
            f"undecodable={undecodable!r} is unknown; choose one of {get_args(UndecodablePolicy)}"
        )
    return FileDocuments(find_data_files(data, exclude), undecodable, text_column)


class FileDocuments:
    """The documents of a list of files; made by `open_documents`. Holds no open file."""

    def __init__(self, files: Sequence[DataFile], undecodable: UndecodablePolicy, text_column: str) -> None:
        self._files = files
        self._policy = undecodable
        self._undecodable: set[int] = set()
        self._readers = [_reader(file, text_column) for file in files]
        self._starts = array("Q", [0])
        for reader in self._readers:
            self._starts.append(self._starts[-1] + reader.count)
        self._text_column = text_column
        if not len(self) or not any(file.size for file in files):
            first = files[0].path if files else "none"
            raise DataError(
                f"the data hold no text: {len(files)} file(s), all of them empty (the first: {first})"
            )

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> str:
        """The text of a document.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The document cannot be read, is malformed, or is not UTF-8 (the last only if
                ``undecodable`` is ``"error"``). The message names the file, and the line or row.
        """
        reader, place = self._locate(index)
        try:
            return reader.read(place, "strict")
        except UnicodeDecodeError as error:
            if self._policy == "error":
                raise DataError(
                    f"{reader.where(place)}: not UTF-8 at byte {error.start}, which is "
                    f"0x{error.object[error.start]:02x}; convert the file, exclude it, or set undecodable to "
                    "'skip' or 'replace'"
                ) from error
            self._undecodable.add(index)
            return "" if self._policy == "skip" else reader.read(place, "replace")

    @property
    def undecodable(self) -> int:
        """Number of different documents met so far, in this process, that are not UTF-8."""
        return len(self._undecodable)

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self._files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def where(self, index: int) -> str:
        """The place of a document in words: file, and line or row."""
        reader, place = self._locate(index)
        return reader.where(place)

    def fingerprint(self) -> str:
        """Digest of relative names, sizes and numbers of documents, and of the text column.

        How undecodable documents are treated does not count: under "error" none has been delivered, so a run
        that met one can go on with another choice.
        """
        digest = hashlib.sha256(f"{len(self)} documents {self._text_column!r}\n".encode())
        for file, reader in zip(self._files, self._readers, strict=True):
            digest.update(f"{file.name!r} {file.size} {reader.count}\n".encode())
        return digest.hexdigest()

    def _locate(self, index: int) -> tuple[Reader, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} is outside a source of {len(self)} documents")
        # Files without documents repeat a start; the last of equal starts is the file that has some.
        number = bisect_right(self._starts, index) - 1
        return self._readers[number], index - self._starts[number]


def _reader(file: DataFile, text_column: str) -> Reader:
    name = file.path.lower()
    if name.endswith(".jsonl"):
        return JsonLinesReader(file.path, text_column)
    if name.endswith(".parquet"):
        return ParquetReader(file.path, text_column)
    return TextReader(file.path)
