"""This rank's part of a dataset that is to be scored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import Indexed

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


class _Fetching(Protocol[Item_co]):
    def __getitems__(self, indices: Sequence[int], /) -> Sequence[Item_co]: ...


class EvaluationShard(Dataset[Item], Generic[Item]):
    """Every ``world_size``-th item of a map-style dataset, from the one at ``rank`` on.

    Made by `shard_for_evaluation`. It holds no list of indices: its size does not depend on the dataset's.

    Attributes:
        dataset: The whole dataset.
        indices: Where the items are in it.
    """

    def __init__(self, dataset: Indexed[Item], indices: range) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        """Number of items on this rank; 0 if there are fewer items than ranks."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Item:
        """The item at a position of this shard.

        Raises:
            IndexError: There is none.
        """
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Item]:
        """Several items at once, as torch's loaders ask for them."""
        places = [self.indices[index] for index in indices]
        if callable(getattr(self.dataset, "__getitems__", None)):
            return cast("_Fetching[Item]", self.dataset).__getitems__(places)
        return [self.dataset[place] for place in places]


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
            f"rank={rank} of world_size={world_size} is out of range; it must be at least 0 and less than "
            "world_size"
        )
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, and sharding by index needs a length and an index; let "
            "an iterable dataset shard itself, and give its loader to EvaluationLoader"
        )
    return EvaluationShard(dataset, range(rank, len(dataset), world_size))
