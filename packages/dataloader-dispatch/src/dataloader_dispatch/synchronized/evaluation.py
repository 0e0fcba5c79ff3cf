"""Evaluation that scores every example once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import Indexed, exact_length, is_indexed, length_of
from dataloader_dispatch.synchronized.loader import SynchronizedDataLoader
from dist_env import StaticDistributedEnvironment, barrier

Batch = TypeVar("Batch")
Item = TypeVar("Item")


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
            raise DataError(f"max_batches={max_batches} must be at least 1, or None for all.")
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

    def end_workers(self) -> None:
        """Leave the pass on this rank, and end the worker processes of the loader."""
        self._batches.end_workers()

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
            raise TypeError("the loader has no exact length.")
        return length if self._most is None else min(length, self._most)


def _itself(batch: Batch) -> Batch:
    return batch


def _row_count(batch: object) -> int:
    rows = _rows(batch)
    if rows is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} holds no tensor with rows, so its size is unknown. "
            "Collate into tensors whose first dimension is the batch."
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


class EvaluationShard(Subset[Item]):
    """Every ``world_size``-th item of a map-style dataset, from the one at ``rank`` on.

    Made by `shard_for_evaluation`. It holds no list of indices: its size does not depend on the dataset's.

    Attributes:
        dataset: The whole dataset.
        indices: Where the items are in it, a range.
    """


def shard_for_evaluation(dataset: Indexed[Item], rank: int, world_size: int) -> EvaluationShard[Item]:
    """This rank's part of a dataset, of which every item is on exactly one rank.

    Rank r has the items r, r + world_size, r + 2 * world_size, ... Nothing is repeated to make the parts
    equal: they differ by one item at most, and `EvaluationLoader` deals with that.

    Args:
        dataset: Map-style: it has a length and is indexed by integers. The same on every rank.
        rank: Rank among those that evaluate, 0 <= rank < world_size.
        world_size: Number of ranks that evaluate.

    Returns:
        The part, a map-style dataset for `torch.utils.data.DataLoader`.

    Raises:
        DataError: ``rank`` or ``world_size`` is out of range.
        TypeError: The dataset has no length or index.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise DataError(
            f"rank={rank} of world_size={world_size} must be at least 0 and less than world_size."
        )
    if not is_indexed(dataset) or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, and sharding by index needs a length and an index. Let "
            "an iterable dataset shard itself, and give its loader to EvaluationLoader."
        )
    indices = range(rank, len(dataset), world_size)
    return EvaluationShard(cast("Dataset[Item]", dataset), indices)


class GlobalMean:
    """The mean of something over all examples of all ranks: one sum, divided once.

    Adding does not wait for the device and sends nothing. Sums are kept in float64 on the device.

    Args:
        process_group: The ranks; None for all. One rank if there is no process group.
        device: Where what is added lives; None for the CPU. With several ranks, a device that the process
            group works on.
        timeout_seconds: How long `compute` waits for the other ranks.

    Raises:
        DataError: ``timeout_seconds`` is not positive.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        *,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not timeout_seconds > 0:
            raise DataError(f"timeout_seconds={timeout_seconds!r} must be positive.")
        self.process_group = process_group
        self.timeout_seconds = timeout_seconds
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add a sum over examples and the number of examples in it.

        Args:
            total: The sum, a number or a tensor of one element; of valid rows only.
            count: How many examples it is the sum of, likewise.
        """
        self._totals[0] += total
        self._totals[1] += count

    def reset(self) -> None:
        """Forget what was added."""
        self._totals.zero_()

    def compute(self) -> float:
        """The mean over all ranks, the same on each of them. Collective.

        The sums of the ranks are added in the order of the ranks, in float64. Up to rounding in float64 the
        result does not depend on how examples are spread over ranks.

        Raises:
            DataError: Nothing was counted on any rank.
            RankTimeoutError: A rank did not come; names it.
        """
        totals = self._gather()
        total, count = sum(part[0] for part in totals), sum(part[1] for part in totals)
        if count == 0:
            raise DataError(
                f"mean over {len(totals)} ranks: nothing was counted on any of them. Check that the "
                "evaluation set is not empty, that drop_last=True does not drop what a rank has "
                "(batch_size times the number of ranks may exceed the set), and that labels and masks "
                "leave something to count."
            )
        return total / count

    def _gather(self) -> list[list[float]]:
        if not (dist.is_available() and dist.is_initialized()):
            return [self._totals.tolist()]
        size = dist.get_world_size(self.process_group)
        if size == 1:
            return [self._totals.tolist()]
        env = StaticDistributedEnvironment(
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
        )
        # A collective of a training backend cannot say who is missing; this can.
        barrier(env, timeout=self.timeout_seconds, process_group=self.process_group, tag="computing a mean")
        parts = [torch.empty_like(self._totals) for _ in range(size)]
        dist.all_gather(parts, self._totals, group=self.process_group)
        return [part.tolist() for part in parts]
