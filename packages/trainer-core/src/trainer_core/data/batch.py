"""Batches: a mapping with `labels`, grouped into the windows of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigurationError, DataError
from ..loss import OnTargets, TokenLoss

Batch = Mapping[str, object]
"""`labels`, for a language model int64 [batch, sequence], and the model's keyword arguments, usually
`input_ids`."""


class Window(NamedTuple):
    """The microbatches of one optimizer step on this rank, with their token counts.

    Counts that depend on the data are int64 scalars where the data is, so that nothing waits for the device.
    """

    batches: list[Batch]
    """As `with_targets` has them."""
    positions: list[Tensor]
    """What the model works on, position by position: of each microbatch `input_ids`, or else the labels."""
    target_tokens: Tensor
    """Positions that count in the loss."""
    input_tokens: list[Tensor | int]
    """Positions that are not padding, for each microbatch."""


def next_window(batches: Iterator[Batch], size: int, loss: TokenLoss) -> Window | None:
    """Take up to `size` microbatches; the last window of an epoch may be shorter.

    Returns:
        The window, or None when the epoch has no more data.

    Raises:
        DataError: If a batch is not a mapping with a `labels` tensor.
    """
    taken = list(islice(batches, size))
    if not taken:
        return None
    labels = [labels_of(batch) for batch in taken]
    counts = [loss.count(part) for part in labels]
    positions = [_positions(batch, part) for batch, part in zip(taken, labels, strict=True)]
    return Window(
        batches=[with_targets(batch, loss) for batch in taken],
        positions=positions,
        target_tokens=counts[0] if len(counts) == 1 else torch.stack(counts).sum(),
        input_tokens=[_input_tokens(batch, part) for batch, part in zip(taken, positions, strict=True)],
    )


def with_targets(batch: Batch, loss: TokenLoss) -> Batch:
    """A batch for the executor: with targets in the place of labels, if the loss is one of targets.

    Raises:
        ConfigurationError: If targets cannot be made from these labels.
        DataError: If the batch is not a mapping with a `labels` tensor.
    """
    if not isinstance(loss, OnTargets):
        return batch
    labels = labels_of(batch)
    targets = loss.loss.make_targets(labels)
    if targets.shape != labels.shape:
        raise ConfigurationError(
            "compute_loss_func",
            type(loss.loss).__name__,
            f"made targets of shape {list(targets.shape)} from labels of shape {list(labels.shape)}, but "
            "targets must have the shape of the labels, because they are cut like them",
            "return targets in the shape of the labels from make_targets",
        )
    return {**batch, "labels": targets}


def row_length(positions: Tensor) -> int:
    """Length of the rows; 1 where each has a single position, as the examples of a classifier."""
    return positions.shape[-1] if positions.ndim > 1 else 1


def labels_of(batch: Batch) -> Tensor:
    """The labels of a batch.

    Raises:
        DataError: If the batch is not a mapping, or has no tensor named `labels`.
    """
    # A dict is asked for first: the check for any other mapping takes longer.
    if not isinstance(batch, dict) and not isinstance(batch, Mapping):
        raise DataError(
            f"a batch is of type {type(batch).__name__}, but must map names to tensors. Give a "
            "data_collator that returns a dict with 'labels'."
        )
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise DataError(
            f"a batch has the keys {sorted(batch)} but no tensor 'labels'. Add it in the dataset or the "
            "data_collator."
        )
    return labels


def to_device(batch: Batch, device: torch.device) -> dict[str, object]:
    """Copy the tensors of a batch to a device without waiting; other values pass through."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _positions(batch: Batch, labels: Tensor) -> Tensor:
    ids = batch.get("input_ids")
    return ids if isinstance(ids, Tensor) else labels


def _input_tokens(batch: Batch, positions: Tensor) -> Tensor | int:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        return mask.sum(dtype=torch.int64)
    return positions.numel()
