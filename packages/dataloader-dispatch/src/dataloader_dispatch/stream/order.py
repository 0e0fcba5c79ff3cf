"""The order of the documents of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dataloader_dispatch.documents import DocumentSource
from dataloader_dispatch.shuffle import ShuffledIndex


@runtime_checkable
class EpochOrdered(Protocol):
    """A source that decides itself which of its documents an epoch has, and in which order."""

    def epoch_order(self, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
        """Numbers of documents; computed when asked for, of the same length in every epoch."""
        ...


def epoch_order(source: DocumentSource, seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """Numbers of the documents of an epoch, in order: a pure function of (source, seed, epoch, shuffle)."""
    if isinstance(source, EpochOrdered):
        return source.epoch_order(seed, epoch, shuffle)
    count = len(source)
    return ShuffledIndex(count, seed, epoch) if shuffle else range(count)
