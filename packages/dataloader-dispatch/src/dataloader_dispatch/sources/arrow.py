"""Reader of Arrow IPC files, in the file format and in the stream format of Hugging Face caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataloader_dispatch.sources.columns import Column, ColumnReader, import_pyarrow
from dataloader_dispatch.sources.unreadable import UnreadableError

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


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

    def _mapped(self) -> _Mapped:
        pyarrow = import_pyarrow(self._path, self.kind)
        self._refuse_changed()
        with pyarrow.memory_map(self._path) as file:
            # The content outlives the file object, and a closed file does not count as an open one.
            content = file.read_buffer()
        if content.size < len(_FILE_MAGIC):
            raise UnreadableError(
                f"{self._path} is not a readable Arrow file: it has {content.size} bytes; write it again"
            )
        is_file = content.slice(0, len(_FILE_MAGIC)).to_pybytes() == _FILE_MAGIC
        if not is_file and content.slice(max(content.size - 8, 0)).to_pybytes() != _END_OF_STREAM:
            # A stream that was cut between two batches looks whole otherwise.
            raise UnreadableError(
                f"{self._path} is not a readable Arrow file: it is neither in the file format nor a stream "
                "with its end; it is damaged or not complete: write it again"
            )
        open_ipc = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
        field = self._field(open_ipc(content).schema)
        options = pyarrow.ipc.IpcReadOptions(included_fields=[field], use_threads=False)
        return _Mapped(content, is_file, open_ipc(content, options=options))


@dataclass(frozen=True, slots=True)
class _Mapped:
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
