"""Rows to leave out, because training on them went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.position import is_count


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """Consecutive rows of one epoch.

    Row number i of an epoch is row ``i // shards`` of shard ``i % shards``. Where the number of
    ranks divides ``shards`` this is, up to the end of the first shard, the order in which rows are delivered,
    over all ranks: update number u of an epoch, from 0, with g rows in a global batch, has the rows u * g to
    (u + 1) * g - 1. Rows that are skipped already make no update.

    Attributes:
        epoch: Epoch number, from 0.
        start: First row.
        stop: Row after the last one.

    Raises:
        DataError: A number is negative or no integer, or the span is empty.
    """

    epoch: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        counts = all(is_count(value) for value in (self.epoch, self.start, self.stop))
        if not counts or not self.start < self.stop:
            raise DataError(
                f"{self} is no span of rows: all three are integers, epoch and start count from 0, and "
                "stop is greater than start"
            )

    def holds(self, epoch: int, number: int) -> bool:
        """Whether a row lies in the span."""
        return epoch == self.epoch and self.start <= number < self.stop


def checked_spans(skip: Sequence[RowSpan]) -> tuple[RowSpan, ...]:
    """The spans of a setting.

    Raises:
        DataError: It is something other than a sequence of spans.
    """
    if not isinstance(skip, list | tuple) or not all(isinstance(span, RowSpan) for span in skip):
        raise DataError(
            f"skip={skip!r} must be a list of RowSpan, such as [RowSpan(epoch=0, start=8, stop=16)]"
        )
    return tuple(skip)
