"""A column of a dataset whose rows are mappings, as documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol, runtime_checkable

import torch

from dataloader_dispatch.documents import token_tensor
from dataloader_dispatch.errors import DataError


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
                f"the dataset has no column {column!r}; it holds {names}; name the column of the text, or of "
                f"the token ids{f', such as {near[0]!r}' if near else ''}"
            )
        chosen = isinstance(dataset, _SelectsColumns)
        self._dataset = dataset.select_columns([column]) if chosen else dataset  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> str | torch.Tensor:
        """A document: its text, or its token ids as an int64 tensor of shape [n].

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The row lacks the column, or holds neither text nor token ids there.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"document {index} is outside a source of {self._length} documents")
        row = self._dataset[index]
        if not isinstance(row, Mapping) or self._column not in row:
            found = (
                f"holds {sorted(map(str, row))}" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
            )
            raise DataError(
                f"{self.where(index)}: the row {found}; rows must be mappings that have the column (for a "
                "Hugging Face dataset in another format: dataset.with_format(None))"
            )
        value = row[self._column]
        if isinstance(value, str):
            return str(value)  # numpy has a kind of its own
        if (
            isinstance(value, bytes | bytearray)
            or not hasattr(value, "__len__")
            or isinstance(value, Mapping)
        ):
            raise DataError(
                f"{self.where(index)} holds a {type(value).__name__}, {value!r:.40}, which is neither text "
                "nor token ids; choose another column, or leave such rows out of the dataset"
            )
        return token_tensor(value, self.where(index))  # type: ignore[arg-type]  # it says what is wrong

    def where(self, index: int) -> str:
        """The place of a document in words."""
        return f"row {index}, column {self._column!r}"


def _length(dataset: object) -> int:
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the dataset is a mapping with the keys {sorted(map(str, dataset))}, such as one of splits; "
            "pass one of them, as in dataset['train']"
        )
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"the dataset, a {type(dataset).__name__}, has no length; documents need random access: pass a "
            "map-style dataset (without streaming=True)"
        ) from error
    if not length:
        raise DataError("the dataset has no rows; give at least one")
    return length


def _column_names(dataset: MapDataset) -> list[str]:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Sequence) and not isinstance(names, str):
        return [str(name) for name in names]
    try:
        first = dataset[0]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"the dataset, a {type(dataset).__name__}, does not give rows by their numbers; pass rows, as "
            "frame.to_dict('records') of a pandas DataFrame"
        ) from error
    if not isinstance(first, Mapping):
        raise DataError(
            f"the rows of the dataset are of type {type(first).__name__}; they must be mappings from column "
            "names to values (documents that are no rows need no ColumnDocuments)"
        )
    return [str(name) for name in first]
