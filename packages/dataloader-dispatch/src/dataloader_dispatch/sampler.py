"""The order of an ordinary dataset, with a position of two numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

from dataloader_dispatch.shuffle import ShuffledIndex


class EpochSampler(Sampler[int]):
    """Indices of a dataset in order, or shuffled by `ShuffledIndex`, from a position to the epoch's end.

    Args:
        length: Number of items.
        shuffle: Whether each epoch has a shuffled order of its own.
        seed: Seed of the shuffled orders.

    Attributes:
        epoch: Epoch of the next index.
        position: Position of the next index in the epoch's order. The sampler does not move it: workers ask
            for indices long before their batches are received.
    """

    def __init__(self, length: int, shuffle: bool, seed: int) -> None:
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order()  # refuses a seed that is no integer

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        return (order[position] for position in range(self.position, self.length))

    def _order(self) -> Sequence[int]:
        return ShuffledIndex(self.length, self.seed, self.epoch) if self.shuffle else range(self.length)
