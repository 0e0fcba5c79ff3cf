"""Documents in objects of a store: the readers of files, with ranges of an object in their place."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from dataloader_dispatch.sources.columns import (
    ArrowReader,
    ParquetReader,
    RecentColumns,
    import_pyarrow,
)
from dataloader_dispatch.sources.files import (
    JsonLinesReader,
    ReadSettings,
    RecentFiles,
    TextReader,
    UnreadableError,
    decode,
    refuse_large,
)
from dataloader_dispatch.store.reader import StoredFile, StoredStream, UnavailableError
from dist_env import StoreError

_TRIES = 5
_READ_BYTES = 1 << 20

FileSpan: TypeAlias = tuple[StoredFile, int, int]
"""A part of an object: its bytes from a first one up to, not including, another."""


@contextmanager
def stored_errors() -> Iterator[None]:
    """An object that is gone or was replaced is an unreadable file. An outage of the store is not."""
    try:
        yield
    except UnavailableError as error:
        raise UnreadableError(str(error)) from None


class StoredTextReader(TextReader):
    """An object that is one document."""

    __slots__ = ("_file",)

    def __init__(self, file: StoredFile, settings: ReadSettings) -> None:
        super().__init__(str(file), file.size, settings)
        self._file = file

    def read(self, index: int, errors: str) -> str:
        refuse_large(self._path, self._size, self._settings.max_document_bytes)
        with stored_errors():
            return decode(self._file.read(0, self._size), errors)

    def span(self, index: int) -> FileSpan:
        return self._file, 0, self._size


class StoredLinesReader(JsonLinesReader):
    """An object with one JSON object a line."""

    __slots__ = ("_file",)

    def __init__(self, file: StoredFile, settings: ReadSettings, recent: RecentFiles) -> None:
        self._file = file
        super().__init__(str(file), settings, recent)

    def span(self, index: int) -> FileSpan:
        return self._file, self._starts[index], self._starts[index + 1]

    @contextmanager
    def _stream(self) -> Iterator[BinaryIO]:
        with stored_errors():
            raw = StoredStream(self._file, ahead=True)
            yield io.BufferedReader(raw, _READ_BYTES)

    def _line(self, start: int, stop: int) -> bytes:
        with stored_errors():
            return self._file.read(start, stop)


class StoredParquetReader(ParquetReader):
    """One document a row of an object, of which the footer and the chunks of one column are read."""

    __slots__ = ("_file", "_places")

    def __init__(self, file: StoredFile, settings: ReadSettings, recent: RecentColumns) -> None:
        self._file = file
        self._places: list[tuple[int, int]] = []
        super().__init__(str(file), settings, recent)

    def span(self, index: int) -> FileSpan:
        start, stop = self._places[bisect_right(self._starts, index) - 1]
        return self._file, start, stop

    def _block_rows(self) -> Iterator[int]:
        with self._opened() as file:
            leaf = self._leaf(file)
            for group in range(file.metadata.num_row_groups):
                about = file.metadata.row_group(group)
                self._places.append(_chunk_place(about.column(leaf)))
                yield about.num_rows

    def _leaf(self, file: Any) -> int:
        """Number of the column among those of the format, of which a list of lists has several."""
        self._field(file.schema_arrow)
        paths = [file.metadata.schema.column(number).path for number in range(file.metadata.num_columns)]
        name = self._settings.text_column
        inside = f"{name}."
        return next(at for at, path in enumerate(paths) if path == name or path.startswith(inside))

    def _size_now(self) -> int:
        return self._file.size

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with stored_errors(), super()._opened() as file:
            yield file

    def _source(self) -> Any:
        return import_pyarrow(self._path, self.kind).PythonFile(StoredStream(self._file), mode="r")


def _chunk_place(chunk: Any) -> tuple[int, int]:
    """Where a column chunk of a Parquet file lies, by the footer."""
    first = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < first:
        first = chunk.dictionary_page_offset
    return first, first + chunk.total_compressed_size


class StoredArrowReader(ArrowReader):
    """One document a row of an object, which is brought here as a whole and mapped."""

    __slots__ = ("_file",)

    def __init__(self, file: StoredFile, settings: ReadSettings, recent: RecentColumns) -> None:
        self._file = file
        super().__init__(str(file), settings, recent)

    def _size_now(self) -> int:
        return self._file.size

    def _content(self, pyarrow: Any) -> Any:
        if not self._file.size:
            return pyarrow.py_buffer(b"")
        for _ in range(_TRIES):
            with stored_errors():
                path = self._file.local_copy()
            try:
                with pyarrow.memory_map(path) as file:
                    content = file.read_buffer()
            except FileNotFoundError:
                continue  # removed in the meantime, as others needed the room
            if content.size == self._file.size:
                return content
        raise StoreError(
            f"{self._path} was removed from the cache {_TRIES} times before it could be mapped. Raise "
            "cache_bytes, or give each job a cache_dir of its own"
        )


class StoredIntegers:
    """Integers in an object, of which ranges are read.

    Args:
        file: The object.
        kind: Their type.
    """

    def __init__(self, file: StoredFile, kind: np.dtype[np.integer]) -> None:
        self._file = file
        self._kind = kind

    def __getitem__(self, places: slice) -> np.ndarray[tuple[int], np.dtype[np.integer]]:
        """The integers at a range of places, of shape [stop - start]."""
        start, stop = self.bytes_of(int(places.start), int(places.stop))
        with stored_errors():
            return np.frombuffer(self._file.read(start, stop), dtype=self._kind)

    def bytes_of(self, start: int, stop: int) -> tuple[int, int]:
        """Where integers lie in the object."""
        return start * self._kind.itemsize, stop * self._kind.itemsize

    def span(self, start: int, stop: int) -> FileSpan:
        """Where integers lie."""
        return self._file, *self.bytes_of(start, stop)
