"""Rows to leave out, because training on them went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from dataloader_dispatch.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """Consecutive rows of one epoch.

    Row number i of an epoch is row ``i // shards`` of shard ``i % shards``. Up to the end of the first shard
    this is the order in which rows are delivered, over all ranks: update number u of an epoch, from 0, with g
    rows in a global batch, has the rows u * g to (u + 1) * g - 1.

    Attributes:
        epoch: Epoch number, from 0.
        start: First row.
        stop: Row after the last one.

    Raises:
        DataError: The numbers are negative, or the span is empty.
    """

    epoch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or not 0 <= self.start < self.stop:
            raise DataError(
                f"{self} is no span of rows: epoch and start count from 0, and stop is greater than start"
            )

    def holds(self, epoch: int, number: int) -> bool:
        """Whether a row lies in the span."""
        return epoch == self.epoch and self.start <= number < self.stop
