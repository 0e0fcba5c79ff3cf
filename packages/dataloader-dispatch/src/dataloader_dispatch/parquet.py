"""Reader of Parquet files; pyarrow (the extra ``arrow``) is imported when the first one is opened."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.readers import decode

_CACHE_BYTES = 256 << 20


class ParquetReader:
    """One document a row.

    Rows are read by row group, the unit of the format. The groups read last are kept, up to 256 MiB in all
    for each file; larger files are slow to read in a shuffled order, because a group is read for each row.
    """

    __slots__ = ("_groups", "_path", "_starts", "_text_column")

    def __init__(self, path: str, text_column: str) -> None:
        self._path = path
        self._text_column = text_column
        self._groups: dict[int, Any] = {}
        self._starts = array("Q", [0])
        with _opened(path) as file:
            self._check_column(file.schema_arrow)
            for group in range(file.metadata.num_row_groups):
                self._starts.append(self._starts[-1] + file.metadata.row_group(group).num_rows)

    @property
    def count(self) -> int:
        return self._starts[-1]

    def read(self, index: int, errors: str) -> str:
        group = bisect_right(self._starts, index) - 1
        raw = self._column(group)[index - self._starts[group]].as_py()
        if raw is None:
            raise DataError(f"{self.where(index)}: {self._text_column!r} is null, which is not a string")
        return decode(raw, errors)

    def where(self, index: int) -> str:
        return f"{self._path} row {index}"

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Copies for other processes leave the kept row groups behind."""
        kept: dict[str, object] = {
            "_path": self._path,
            "_text_column": self._text_column,
            "_starts": self._starts,
            "_groups": {},
        }
        return None, kept

    def _check_column(self, schema: Any) -> None:
        if self._text_column not in schema.names:
            raise DataError(
                f"{self._path}: no column {self._text_column!r}; the file holds {schema.names}; name the "
                "column of the text with text_column"
            )
        kind = str(schema.field(self._text_column).type)
        if kind not in ("string", "large_string"):
            raise DataError(f"{self._path}: column {self._text_column!r} holds {kind}, not strings")

    def _column(self, group: int) -> Any:
        """The text of a row group, as bytes; the group used last stands last in the cache."""
        column = self._groups.pop(group, None)
        if column is None:
            with _opened(self._path) as file:
                texts = file.read_row_group(group, columns=[self._text_column]).column(0)
                column = texts.cast("large_binary")
            room = _CACHE_BYTES - column.nbytes
            while self._groups and sum(kept.nbytes for kept in self._groups.values()) > room:
                del self._groups[next(iter(self._groups))]
        self._groups[group] = column
        return column


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``; what goes wrong in it becomes a `DataError` that names the file."""
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path} is a Parquet file; reading it needs pyarrow, which is not installed: "
            "pip install 'dataloader-dispatch[arrow]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
