"""Batches: a mapping with `labels`, padded from rows, and grouped into the windows of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import ConfigurationError, DataError
from ..loss import IGNORE_INDEX, OnTargets, TokenLoss, ignored_like

Batch = Mapping[str, object]
"""`labels`, for a language model int64 [batch, sequence], and the model's keyword arguments, usually
`input_ids`."""


class PaddingCollator:
    """Makes a batch of rows of unequal length: each sequence is padded on the right to the longest one.

    A row maps names to sequences of numbers, or to single numbers, which are stacked. `input_ids` are padded
    by `pad_token_id`, `labels` by -100, all else by 0, and numbers that are
    labels by what no loss counts. The batch has an `attention_mask`, also if the rows have
    none.

    Rows without `labels` are to be continued: their labels are the tokens, not shifted. With a
    `completion_mask` only those where it is 1, so that a prompt counts nothing in the loss; the mask is not
    given to the model.

    Args:
        pad_token_id: Stands in `input_ids` where a row has ended; the model does not see it.
    """

    def __init__(self, pad_token_id: int = 0) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[object]) -> dict[str, Tensor]:
        """Make the batch.

        Args:
            rows: Mappings with the same keys; values are lists, tensors or numbers.

        Returns:
            Tensors [rows, longest], and [rows] of single numbers.

        Raises:
            DataError: If rows are no mappings, differ in their keys, or have sequences that do not belong
                together.
        """
        given = [self._complete(row) for row in rows]
        if len({frozenset(row) for row in given}) > 1:
            kinds = sorted({str(sorted(row)) for row in given})
            raise DataError(
                f"the rows of a batch have different keys: {', '.join(kinds)}. Give all rows the same keys."
            )
        return {name: self._padded(name, [row[name] for row in given]) for name in given[0]}

    def _complete(self, row: object) -> dict[str, Tensor]:
        if not isinstance(row, Mapping):
            raise DataError(
                f"a row is of type {type(row).__name__}, but must map names to sequences. Write "
                "{'input_ids': [...]}, for example."
            )
        made = {name: torch.as_tensor(value) for name, value in row.items()}
        ids, counts = made.get("input_ids"), made.pop("completion_mask", None)
        if ids is None:
            return made
        made.setdefault("attention_mask", torch.ones_like(ids))
        made.setdefault("labels", ids)
        for name, mask in (("attention_mask", made["attention_mask"]), ("completion_mask", counts)):
            if mask is not None and mask.shape != ids.shape:
                raise DataError(
                    f"a row has input_ids of shape {list(ids.shape)} and {name} of shape {list(mask.shape)}. "
                    "Give the mask one number for each token."
                )
        if counts is not None:
            made["labels"] = made["labels"].where(counts.bool(), IGNORE_INDEX)
        return made

    def _padded(self, name: str, values: list[Tensor]) -> Tensor:
        if any(value.ndim == 0 for value in values):
            return torch.stack(values)
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}.get(name, 0)
        batch = pad_sequence(values, batch_first=True, padding_value=fill)
        if name != "labels" or not batch.is_floating_point():
            return batch
        given = pad_sequence([torch.ones_like(value, dtype=torch.bool) for value in values], batch_first=True)
        return batch.where(given, ignored_like(batch))


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
