"""Reader of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataloader_dispatch.sources.columns import Column, ColumnReader, import_pyarrow
from dataloader_dispatch.sources.unreadable import UnreadableError


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
                    f"{self._path} has fewer row groups than when it was opened; open the data again"
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
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]

        with pyarrow.parquet.ParquetFile(self._path, page_checksum_verification=True) as file:
            yield file
