"""Batches of packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.packing import PackedDocuments


class PackedLoader:
    """Batches of the rows of a `PackedDocuments`, on the CPU, made in this process when they are asked for.

    Iterating yields the batches that remain of the current epoch:
    ``{"input_ids": int64 [B, S], "labels": int64 [B, S]}`` with B = ``batch_size``, fewer in the last batch
    of an epoch, and S = ``sequence_length``. Labels are not shifted; padding is -100 in them. There is no
    length: how many rows an epoch has is known when its documents have been read.

    The state counts what the caller received: saved after batch k, it resumes at batch k + 1. It holds no
    batch size, so another batch size may continue it. Saved after the last batch of an epoch, it resumes
    at the start of the next epoch.

    Args:
        dataset: The rows. Its cursor is the loader's position.
        batch_size: Rows in a batch, at least 1.

    Raises:
        DataError: ``batch_size`` is not a positive integer.
    """

    def __init__(self, dataset: PackedDocuments, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = positive_batch_size(batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches that remain of the current epoch.

        Raises:
            DataError: A document cannot be read or encoded. The position stays behind the last batch
                delivered.
            RuntimeError: A newer iterator was made.
        """
        rows = iter(self.dataset)
        while (batch := self._next_batch(rows)) is not None:
            yield batch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self.dataset.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of the epoch's documents that were delivered whole, from 0 to below 1."""
        return self.dataset.epoch_progress

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The position behind the last batch delivered, as numbers and strings; see `PackedDocuments`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position.

        Raises:
            DataError: The state was saved with other data or settings, or is damaged.
        """
        self.dataset.load_state_dict(state)

    def _next_batch(self, rows: Iterator[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor] | None:
        before = self.dataset.state_dict()
        try:
            taken = list(islice(rows, self.batch_size))
            return {name: torch.stack([row[name] for row in taken]) for name in taken[0]} if taken else None
        except BaseException:
            # Rows taken for a batch that nobody received, on Ctrl-C as well, are to come again.
            if self.dataset.state_dict() != before:
                self.dataset.load_state_dict(before)
            raise


def positive_batch_size(batch_size: int) -> int:
    """``batch_size`` if it is a positive integer, else `DataError`."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"batch_size={batch_size!r} is out of range; it must be an integer of at least 1")
    return batch_size
