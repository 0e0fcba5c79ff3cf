"""Documents in the column of a table; pyarrow (the extra ``arrow``) is imported when a table is opened."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.cache import RecentlyUsed
from dataloader_dispatch.sources.readers import ReadSettings, decode
from dataloader_dispatch.sources.unreadable import UnreadableError, os_failure, refuse_changed, refuse_large

_LISTS = ("is_list", "is_large_list", "is_fixed_size_list")


class Column:
    """The documents of consecutive rows, as pyarrow arrays that stay as they are in memory or in the file.

    Args:
        arrays: Strings, large strings, or lists of integers; one array a chunk.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = [_as_bytes(one) for one in arrays if len(one)]
        self._starts = [0, *accumulate(len(one) for one in self._arrays)]

    def cell(self, row: int) -> Any:
        """One row, as a pyarrow array of length 1.

        Raises:
            IndexError: The column has fewer rows.
            pyarrow.ArrowInvalid: The row points outside of the data.
        """
        if not 0 <= row < self._starts[-1]:
            raise IndexError(row)
        chunk = bisect_right(self._starts, row) - 1
        piece = self._arrays[chunk].slice(row - self._starts[chunk], 1)
        # Places in the data are numbers in the file. Following a damaged one would end the process.
        piece.validate(full=True)
        return piece


RecentColumns = RecentlyUsed[Column]


class ColumnReader(ABC):
    """One document a row. The rows are loaded by block, a unit of the file format, and kept for a while.

    Args:
        path: The file.
        settings: What to read.
        recent: The blocks loaded last, of all files of a source.
    """

    __slots__ = ("_path", "_recent", "_settings", "_size", "_starts")
    kind: str

    def __init__(self, path: str, settings: ReadSettings, recent: RecentColumns) -> None:
        self._path = path
        self._settings = settings
        self._recent = recent
        with arrow_errors(path, self.kind):
            self._size = os.stat(path).st_size  # noqa: PTH116  (thousands of files)
            self._starts = array("Q", accumulate(self._block_rows(), initial=0))

    @abstractmethod
    def _block_rows(self) -> Iterator[int]:
        """Rows of each block."""

    @abstractmethod
    def _load(self, block: int) -> tuple[Column, int]:
        """The documents of a block, with the bytes of memory they take."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._starts[-1]

    def read(self, index: int, errors: str) -> str | torch.Tensor:
        """Text, or token ids as an int64 tensor of shape [n].

        Raises:
            UnreadableError: The row is null, larger than allowed, holds no token ids, or cannot be read.
            UnicodeDecodeError: ``errors`` is "strict" and the text is not UTF-8.
        """
        # Blocks without rows repeat a start; the last of equal starts is the block that has some.
        block = bisect_right(self._starts, index) - 1
        with arrow_errors(self._path, self.kind):
            column = self._recent.get((self._path, block), lambda: self._load(block))
            try:
                cell = column.cell(index - self._starts[block])
            except IndexError as error:
                raise UnreadableError(
                    f"{self.where(index)} is gone: the file has fewer rows than when it was opened; open the "
                    "data again"
                ) from error
            document = self._document(cell, index)
        return decode(document, errors) if isinstance(document, bytes) else document

    def where(self, index: int) -> str:
        """File and row."""
        return f"{self._path} row {index}"

    def _refuse_changed(self) -> None:
        refuse_changed(self._path, os.stat(self._path).st_size, self._size)  # noqa: PTH116

    def _field(self, schema: Any) -> int:
        """Number of the column in the table; refuses what is not there, or no text and no token ids."""
        name = self._settings.text_column
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            what = f"{len(found)} columns" if found else "no column"
            raise UnreadableError(
                f"{self._path}: {what} {name!r}; the file holds {schema.names}; name the column of the text, "
                "or of the token ids, with text_column"
            )
        kind = schema.field(found[0]).type
        if not (_is_text(kind) or _is_token_list(kind)):
            raise UnreadableError(
                f"{self._path}: column {name!r} holds {kind}, not strings and not lists of integers; choose "
                f"another of {schema.names} with text_column"
            )
        return int(found[0])

    def _document(self, cell: Any, index: int) -> bytes | torch.Tensor:
        name = self._settings.text_column
        if cell.null_count:
            raise UnreadableError(f"{self.where(index)}: {name!r} is null, which is not a string or a list")
        if cell.type.num_fields:  # a list, of its values
            return self._tokens(cell.flatten(), index)
        raw = cell[0].as_buffer()
        refuse_large(self.where(index), raw.size, self._settings.max_document_bytes)
        return bytes(raw.to_pybytes())

    def _tokens(self, tokens: Any, index: int) -> torch.Tensor:
        refuse_large(self.where(index), tokens.nbytes, self._settings.max_document_bytes)
        if tokens.null_count:
            raise UnreadableError(
                f"{self.where(index)}: {self._settings.text_column!r} holds a null among the token ids"
            )
        wide = tokens.cast("int64").to_numpy(zero_copy_only=False)
        # Copied, as the file is mapped for reading only and tensors can be written to.
        return torch.from_numpy(wide.copy())


@contextmanager
def arrow_errors(path: str, kind: str) -> Iterator[None]:
    """What goes wrong in pyarrow while a file is read becomes a `DataError` that names the file."""
    pyarrow = import_pyarrow(path, kind)
    try:
        yield
    except pyarrow.ArrowMemoryError as error:
        size = re.search(r"size (\d+)", str(error))
        if size and int(size[1]) > _memory():
            raise _damaged(path, kind, error) from error  # a number in the file that cannot be right
        raise DataError(
            f"no memory left to read {path}: {error}; free some, use fewer worker processes, or write the "
            "file in smaller row groups or batches"
        ) from error
    except OSError as error:
        # pyarrow raises it without a number for damaged content as well.
        if error.errno:
            raise os_failure(path, error) from error
        raise _damaged(path, kind, error) from error
    except DataError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        # Names that are not UTF-8 and negative counts show as errors of Python.
        raise _damaged(path, kind, error) from error


def import_pyarrow(path: str, kind: str) -> Any:
    """The module ``pyarrow``.

    Raises:
        DataError: It is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise DataError(
            f"{path} is {kind} file; reading it needs pyarrow, which is not installed: "
            "pip install 'dataloader-dispatch[arrow]'"
        ) from error
    return pyarrow


def _memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _damaged(path: str, kind: str, error: Exception) -> UnreadableError:
    return UnreadableError(
        f"{path} is not a readable {kind.split(' ', 1)[1]} file: {error}; it is damaged or not complete: "
        "write it again, exclude it, or leave such files out with unreadable='skip'"
    )


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")


def _is_list(kind: Any) -> bool:
    import pyarrow  # only called with what pyarrow made

    return any(getattr(pyarrow.types, check)(kind) for check in _LISTS)


def _is_token_list(kind: Any) -> bool:
    import pyarrow

    return _is_list(kind) and bool(pyarrow.types.is_integer(kind.value_type))


def _as_bytes(column: Any) -> Any:
    """Strings as the bytes they are, without a copy and without a look at their encoding."""
    name = str(column.type)
    return column.view(name.replace("string", "binary")) if name in ("string", "large_string") else column
