"""Documents in a column: of a dataset, a Parquet file or an Arrow file.

The extra ``arrow`` (pyarrow) is imported when a file is opened.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dataloader_dispatch.documents import token_tensor
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import (
    ReadSettings,
    RecentlyUsed,
    UnreadableError,
    decode,
    os_failure,
    refuse_changed,
    refuse_large,
)
from dist_env import StoreError

if TYPE_CHECKING:
    import torch

_LISTS = ("is_list", "is_large_list", "is_fixed_size_list")
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class MapDataset(Protocol):
    """Rows with random access: a list of dicts, a Hugging Face ``datasets.Dataset``, or the like."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, object]:
        """Row ``index``."""
        ...


@runtime_checkable
class _SelectsColumns(Protocol):
    def select_columns(self, column_names: list[str]) -> MapDataset: ...


class ColumnDocuments:
    """Documents in a column of a dataset; nothing is copied, and a row is read when it is asked for.

    A Hugging Face dataset stays what it is: memory-mapped if it was, and of its columns only the one in
    question is decoded. Its format (``set_format``) may be any that gives lists, arrays or tensors.

    Args:
        dataset: Rows with a length and integer indexing.
        column: Name of the column with the text, or with the token ids.

    Raises:
        DataError: The dataset has no length, is a dict of splits, has no row, or does not have the column.
    """

    def __init__(self, dataset: MapDataset, column: str = "text") -> None:
        self._column = column
        self._length = _length(dataset)
        names = _column_names(dataset)
        if column not in names:
            near = get_close_matches(column, names, n=1)
            raise DataError(
                f"the dataset has no column {column!r}. It holds {names}. Name the column of the text, or "
                f"of the token ids{f', such as {near[0]!r}' if near else ''}."
            )
        self._dataset = dataset.select_columns([column]) if isinstance(dataset, _SelectsColumns) else dataset

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> str | torch.Tensor:
        """A document: its text, or its token ids as an int64 tensor of shape [n].

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The row lacks the column, or holds neither text nor token ids there.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"document {index} is outside a source of {self._length} documents.")
        row = self._dataset[index]
        if not isinstance(row, Mapping) or self._column not in row:
            found = (
                f"holds {sorted(map(str, row))}" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
            )
            raise DataError(
                f"{self.where(index)}: the row {found}, but rows must be mappings that have the column (for "
                "a Hugging Face dataset in another format: dataset.with_format(None))."
            )
        value = row[self._column]
        if isinstance(value, str):
            return str(value)  # numpy has a kind of its own
        if isinstance(value, bytes | bytearray) or not isinstance(value, Sized) or isinstance(value, Mapping):
            raise DataError(
                f"{self.where(index)} holds a {type(value).__name__}, {value!r:.40}, which is neither text "
                "nor token ids. Choose another column, or leave such rows out of the dataset."
            )
        return token_tensor(value, self.where(index))

    def where(self, index: int) -> str:
        """The place of a document in words."""
        return f"row {index}, column {self._column!r}"


def _length(dataset: MapDataset) -> int:
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the dataset is a mapping with the keys {sorted(map(str, dataset))}, such as one of splits. "
            "Pass one of them, as in dataset['train']."
        )
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(
            f"the dataset, a {type(dataset).__name__}, has no length, but documents need random access. "
            "Pass a map-style dataset (without streaming=True)."
        ) from error
    if not length:
        raise DataError("the dataset has no rows. Give at least one.")
    return length


def _column_names(dataset: MapDataset) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Sequence) and not isinstance(names, str):
        return [str(name) for name in names]
    try:
        first = dataset[0]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"the dataset, a {type(dataset).__name__}, does not give rows by their numbers. Pass rows, as "
            "frame.to_dict('records') of a pandas DataFrame."
        ) from error
    if not isinstance(first, Mapping):
        raise DataError(
            f"the rows of the dataset are of type {type(first).__name__}, but they must be mappings from "
            "column names to values (documents that are not rows need no ColumnDocuments)."
        )
    return [str(name) for name in first]


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
            self._size = self._size_now()
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
                    f"{self.where(index)} is gone: the file has fewer rows than when it was opened. Open "
                    "the data again."
                ) from error
            document = self._document(cell, index)
        return decode(document, errors) if isinstance(document, bytes) else document

    def where(self, index: int) -> str:
        """File and row."""
        return f"{self._path} row {index}"

    def _size_now(self) -> int:
        """Bytes of the file."""
        return os.stat(self._path).st_size  # noqa: PTH116  (thousands of files)

    def _refuse_changed(self) -> None:
        refuse_changed(self._path, self._size_now(), self._size)

    def _field(self, schema: Any) -> int:
        """Number of the column in the table; refuses what is not there, or no text and no token ids."""
        name = self._settings.text_column
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            what = f"{len(found)} columns" if found else "no column"
            raise UnreadableError(
                f"{self._path} has {what} {name!r}, and holds {schema.names}. Name the column of the text, "
                "or of the token ids, with text_column."
            )
        kind = schema.field(found[0]).type
        if not (_is_text(kind) or _is_token_list(kind)):
            raise UnreadableError(
                f"{self._path}: column {name!r} holds {kind}, not strings and not lists of integers. Choose "
                f"another of {schema.names} with text_column."
            )
        return int(found[0])

    def _document(self, cell: Any, index: int) -> bytes | torch.Tensor:
        name = self._settings.text_column
        if cell.null_count:
            raise UnreadableError(f"{self.where(index)}: {name!r} is null, which is not a string or a list.")
        if cell.type.num_fields:  # a list, of its values
            return self._tokens(cell.flatten(), index)
        raw = cell[0].as_buffer()
        refuse_large(self.where(index), raw.size, self._settings.max_document_bytes)
        return bytes(raw.to_pybytes())

    def _tokens(self, tokens: Any, index: int) -> torch.Tensor:
        refuse_large(self.where(index), tokens.nbytes, self._settings.max_document_bytes)
        if tokens.null_count:
            raise UnreadableError(
                f"{self.where(index)}: {self._settings.text_column!r} holds a null among the token ids."
            )
        import torch

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
            f"no memory left to read {path}: {error}. Free some, use fewer worker processes, or write the "
            "file in smaller row groups or batches."
        ) from error
    except StoreError:
        raise
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
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path} is {kind} file. Reading it needs pyarrow, which is not installed. Install it with `pip "
            "install 'dataloader-dispatch[arrow]'`."
        ) from error
    return pyarrow


def _memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _damaged(path: str, kind: str, error: Exception) -> UnreadableError:
    return UnreadableError(
        f"{path} is not a readable {kind.split(' ', 1)[1]} file: {error}. It is damaged or not complete. "
        "Write it again, exclude it, or leave such files out with unreadable='skip'."
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


class ParquetReader(ColumnReader):
    """One document a row, read by row group, the unit of the format.

    The groups read last are kept in memory. Data larger than that are slow to read in a shuffled order,
    because a group is read for each row.
    """

    __slots__ = ()
    kind = "a Parquet"

    def _block_rows(self) -> Iterator[int]:
        with self._opened() as file:
            self._field(file.schema_arrow)
            for group in range(file.metadata.num_row_groups):
                yield file.metadata.row_group(group).num_rows

    def _load(self, block: int) -> tuple[Column, int]:
        with self._opened() as file:
            self._field(file.schema_arrow)
            if block >= file.metadata.num_row_groups:
                raise UnreadableError(
                    f"{self._path} has fewer row groups than when it was opened. Open the data again."
                )
            name = self._settings.text_column
            table = file.read_row_group(block, columns=[name])
            # With a dot in it, the name may be that of a field of another column as well.
            rows = table.column(table.schema.names.index(name))
            return Column(rows.chunks), rows.nbytes

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """A ``pyarrow.parquet.ParquetFile``."""
        import_pyarrow(self._path, self.kind)
        self._refuse_changed()
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._source(), page_checksum_verification=True) as file:
            yield file

    def _source(self) -> Any:
        """What pyarrow reads: a path or a file object."""
        return self._path


class ArrowReader(ColumnReader):
    """One document a row of a memory-mapped file.

    The whole file is one block: it is mapped, so that only the rows asked for are read, and it takes no
    memory of its own. Record batches that are compressed have to be unpacked, which does take memory: in
    the file format each of them is a block then, a stream still is one.
    """

    __slots__ = ("_batchwise",)
    kind = "an Arrow"

    def _block_rows(self) -> Iterator[int]:
        mapped = self._mapped()
        rows = [(batch.num_rows, mapped.holds(batch.column(0))) for batch in mapped.batches()]
        self._batchwise = mapped.is_file and not all(held for _, held in rows)
        counts = [count for count, _ in rows]
        yield from counts if self._batchwise else [sum(counts)]

    def _load(self, block: int) -> tuple[Column, int]:
        mapped = self._mapped()
        columns = [batch.column(0) for batch in mapped.batches(block if self._batchwise else None)]
        return Column(columns), sum(column.nbytes for column in columns if not mapped.holds(column))

    def _mapped(self) -> _MappedFile:
        pyarrow = import_pyarrow(self._path, self.kind)
        self._refuse_changed()
        content = self._content(pyarrow)
        if content.size < len(_FILE_MAGIC):
            raise UnreadableError(
                f"{self._path} is not a readable Arrow file: it has {content.size} bytes. Write it again."
            )
        is_file = content.slice(0, len(_FILE_MAGIC)).to_pybytes() == _FILE_MAGIC
        if not is_file and content.slice(max(content.size - 8, 0)).to_pybytes() != _END_OF_STREAM:
            # A stream that was cut between two batches looks whole otherwise.
            raise UnreadableError(
                f"{self._path} is not a readable Arrow file: it is neither in the file format nor a stream "
                "with its end, so it is damaged or not complete. Write it again."
            )
        open_ipc = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        field = self._field(open_ipc(content).schema)
        options = pyarrow.ipc.IpcReadOptions(included_fields=[field], use_threads=False)
        return _MappedFile(content, is_file, open_ipc(content, options=options))

    def _content(self, pyarrow: Any) -> Any:
        """The file in memory, mapped."""
        with pyarrow.memory_map(self._path) as file:
            # The content outlives the file object, and a closed file does not count as an open one.
            return file.read_buffer()


@dataclass(frozen=True, slots=True)
class _MappedFile:
    """A mapped file whose reader gives one column."""

    content: Any
    is_file: bool
    reader: Any

    def batches(self, only: int | None = None) -> Iterator[Any]:
        """All record batches, or one of them."""
        if not self.is_file:
            yield from self.reader
        elif only is None:
            yield from map(self.reader.get_batch, range(self.reader.num_record_batches))
        elif only < self.reader.num_record_batches:
            yield self.reader.get_batch(only)

    def holds(self, column: Any) -> bool:
        """Whether a column lies in the mapped file, and not in memory of its own."""
        start, stop = self.content.address, self.content.address + self.content.size
        return all(start <= buffer.address <= stop for buffer in column.buffers() if buffer and buffer.size)
