"""Evaluation that scores every example once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.synchronized.loader import SynchronizedDataLoader
from dataloader_dispatch.synchronized.opening import exact_length, length_of

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class EvaluationBatch(Generic[Batch]):
    """A batch to evaluate, and which of its rows count.

    Attributes:
        batch: The batch, on the device.
        valid: bool [B], on the device: True for rows to be scored. All False in a batch that only keeps this
            rank company with ranks that still have data.
        is_stand_in: Whether it is such a batch; known without asking the device.
    """

    batch: Batch
    valid: torch.Tensor
    is_stand_in: bool


class EvaluationLoader(Generic[Batch]):
    """Scores every example of all ranks once, in the same number of iterations on every rank.

    A rank that has run out delivers its last batch again, with ``valid`` all False, until the last rank is
    done; so collectives inside the forward pass stay symmetrical. A rank without a single batch gets the
    first one of another rank for that. Nothing is dropped and nothing counted twice, provided that each
    example is on one rank; see `shard_for_evaluation`. Sum over valid rows, divide once: `GlobalMean`.

    It works like `SynchronizedDataLoader` with ``uneven="pad"``: making it, and getting the first batch of a
    pass, are collective; an error on one rank ends the pass on all.

    Args:
        loader: This rank's batches: any iterable that can be iterated anew.
        device: Where tensors go.
        process_group: The ranks; None for all. One rank if there is no process group.
        max_batches: At most so many batches of this rank's loader; ranks may differ. None for all.
        timeout_seconds: How long a rank waits for the others in an exchange.

    Raises:
        DataError: A setting is out of range.
        RankFailedError: A rank is lost.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        device: torch.device | str,
        process_group: dist.ProcessGroup | None = None,
        *,
        max_batches: int | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if max_batches is not None and max_batches < 1:
            raise DataError(
                f"max_batches={max_batches} is out of range; it must be at least 1, or None for all"
            )
        self.loader = loader
        self.max_batches = max_batches
        self._batches = SynchronizedDataLoader(
            _Rows(loader, max_batches),
            device,
            process_group,
            "pad",
            make_dummy=_itself,
            timeout_seconds=timeout_seconds,
        )

    def __iter__(self) -> Iterator[EvaluationBatch[Batch]]:
        """The batches of a pass, equally many on every rank.

        Raises:
            DataError: No rank has a batch, or a batch has no tensor with rows.
            RankFailedError: The loader of another rank failed, or a rank is lost.
        """
        is_empty = True
        for batch, rows in self._batches:
            is_empty = False
            is_stand_in = self._batches.last_is_dummy
            valid = torch.full((rows,), not is_stand_in, device=self._batches.device)
            yield EvaluationBatch(batch, valid, is_stand_in)
        if is_empty:
            raise DataError(self._nothing())

    def __len__(self) -> int:
        """Number of iterations on every rank: the batches of the rank that has most.

        Raises:
            TypeError: The loader of some rank has no length.
        """
        return len(self._batches)

    def close(self) -> None:
        """Close the connections between the ranks, on this rank; it cannot be iterated again."""
        self._batches.close()

    def _nothing(self) -> str:
        loader = self.loader
        items = length_of(getattr(loader, "dataset", None))
        told = {name: getattr(loader, name) for name in ("batch_size", "drop_last") if hasattr(loader, name)}
        if items is not None:
            told["items on this rank"] = items
        described = ", ".join(f"{name}={value}" for name, value in told.items())
        return (
            f"evaluation: none of the {self._batches.world_size} ranks has a batch"
            f"{f' ({described})' if described else ''}. With drop_last=True a rank with fewer items than "
            "batch_size has none: set drop_last to False, lower batch_size, evaluate on fewer ranks, or "
            "check that the dataset and its shards are not empty"
        )


class _Rows(Generic[Batch]):
    """Batches of a loader with their sizes, at most so many."""

    def __init__(self, loader: Iterable[Batch], most: int | None) -> None:
        self._loader = loader
        self._most = most

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        # Counted here, where what a rank raises becomes known to all.
        return ((batch, _row_count(batch)) for batch in islice(self._loader, self._most))

    def __len__(self) -> int:
        length = exact_length(self._loader)
        if length is None:
            raise TypeError("the loader has no exact length")
        return length if self._most is None else min(length, self._most)


def _itself(batch: Batch) -> Batch:
    return batch


def _row_count(batch: object) -> int:
    rows = _rows(batch)
    if rows is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} holds no tensor with rows, so its size is unknown; "
            "collate into tensors whose first dimension is the batch"
        )
    return rows


def _rows(batch: object) -> int | None:
    """Size of the first dimension of the first tensor that has one."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    return next((rows for part in parts if (rows := _rows(part)) is not None), None)
