"""Cut a batch into microbatches of one shape, and put together what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_core import Batch, DataError, ignored_like, labels_of


class Microbatch(NamedTuple):
    """What every stage is given at once."""

    inputs: Mapping[str, object]
    """Keyword arguments of the model."""
    labels: Tensor
    """[rows, ...]."""


def cut(batch: Batch, count: int) -> list[Microbatch]:
    """Cut a batch into microbatches.

    A batch that the count does not divide is filled up with copies of its last row that do not count.

    Args:
        batch: Tensors whose first dimension are its rows, as that of `labels` is, are cut; other values go
            to every microbatch.
        count: How many.

    Returns:
        Microbatches with equally many rows.

    Raises:
        DataError: If the labels have no rows, or are filled up and cannot say that they do not count.
    """
    labels = labels_of(batch)
    if not labels.ndim:
        raise DataError("the labels of a batch are a single number; a pipeline cuts batches along their rows")
    rows = labels.shape[0]
    missing = -rows % count
    cuts: dict[str, tuple[Tensor, ...]] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
            cuts[name] = _filled(value, missing, is_labels=name == "labels").chunk(count)
    whole = {name: value for name, value in batch.items() if name not in cuts}
    pieces = [{**whole, **{name: cuts[name][place] for name in cuts}} for place in range(count)]
    return [Microbatch(piece, _labels_out_of(piece)) for piece in pieces]


def join(predictions: Sequence[object], rows: int) -> object:
    """The predictions of all microbatches, without the rows that were filled up."""
    first = predictions[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([part for part in predictions if isinstance(part, Tensor)])[:rows]
    if not isinstance(first, Mapping):
        return list(predictions)
    parts = [part for part in predictions if isinstance(part, Mapping)]
    joined = {
        name: torch.cat([part[name] for part in parts])[:rows]
        for name, value in first.items()
        if isinstance(value, Tensor) and value.ndim
    }
    make: Callable[..., object] = type(first)  # such as an output class of Hugging Face
    return make(**joined)


def _filled(value: Tensor, missing: int, *, is_labels: bool) -> Tensor:
    # Refused also where nothing is missing: another batch of the run may not come out even.
    if is_labels and not value.dtype.is_signed:
        raise DataError(
            f"labels of {value.dtype} cannot hold -100 for rows that only fill up a batch; convert "
            "them by labels.long() or labels.float() in the dataset or the data_collator"
        )
    if not missing:
        return value
    rows = value[-1:].expand(missing, *value.shape[1:])
    return torch.cat([value, ignored_like(rows) if is_labels else rows])


def _labels_out_of(piece: dict[str, object]) -> Tensor:
    labels = piece.pop("labels")
    if not isinstance(labels, Tensor):
        raise TypeError("labels are a tensor: that was checked before")
    return labels
