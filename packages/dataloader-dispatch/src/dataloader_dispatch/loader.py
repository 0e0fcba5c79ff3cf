"""A resumable loader for ordinary datasets."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from dataloader_dispatch.epochs import epoch_listeners
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.position import below, check_epoch, position_state, saved_counts
from dataloader_dispatch.sampler import EpochSampler
from dataloader_dispatch.stream.document_stream import DocumentStream
from dataloader_dispatch.stream.loader import positive_batch_size
from dataloader_dispatch.stream.settings import check_workers
from dist_env import tie_loader_workers

Item_co = TypeVar("Item_co", covariant=True)
Item = TypeVar("Item")
Batch = TypeVar("Batch")


class Indexed(Protocol[Item_co]):
    """A map-style dataset: it has a length and is indexed by integers, as a list is."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Item_co: ...


class ResumableDataLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A `StatefulDataLoader` of a map-style dataset whose position is (epoch, items received).

    Made by `build_loader`. The state has a few numbers, resuming replays nothing, and another batch size or
    number of workers may continue it. Saved after the last batch of an epoch, it resumes at the start of the
    next epoch.

    As with torch's loaders each ``iter()`` begins the epoch anew; only the first one after
    `load_state_dict` begins at the loaded position. A pass that reaches the end makes the next epoch current.
    """

    def __init__(self, dataset: object, sampler: EpochSampler, **options: object) -> None:
        # A generator of its own: making an iterator draws a seed, and would disturb the random numbers of a
        # run that makes one more because it resumed.
        with warnings.catch_warnings():
            _ignore_torchdata_warning()
            super().__init__(dataset, sampler=sampler, generator=torch.Generator(), **options)
        self._place = sampler
        self._listeners: list[Any] | None = None
        self._told_epoch: int | None = None
        self._loaded = False
        self._passes = 0

    def __iter__(self) -> Iterator[Any]:
        """The batches of the current epoch, or those that remain of it after a state was loaded."""
        place = self._place
        if not self._loaded:
            place.position = 0
        self._loaded = False
        self._passes += 1
        self._tell_epoch()
        self.generator.manual_seed((place.seed + place.epoch * 0x9E3779B97F4A7C15) % 2**63)
        return self._deliver(super().__iter__(), self._passes, place.epoch, place.position)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already.

        From the first call on, a dataset with ``set_epoch`` is told each epoch, when its first pass begins.

        Raises:
            DataError: ``epoch`` is negative.
        """
        check_epoch(epoch)
        if epoch != self._place.epoch:
            self._move(epoch, 0)
        if self._listeners is None:
            self._listeners = epoch_listeners(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch received, and what it has a meaning for. Fit for JSON."""
        counts = {"epoch": self._place.epoch, "position": self._place.position}
        return position_state(counts, self._identity())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position; the next ``iter()`` begins there.

        Raises:
            DataError: The state was saved with another number of items, seed or shuffle setting, or
                is damaged.
        """
        epoch, position = saved_counts(state_dict, ("epoch", "position"), self._identity())
        self._move(epoch, below(position, self._place.length, "position"))
        self._loaded = True

    def _deliver(self, batches: Iterator[Any], number: int, epoch: int, position: int) -> Iterator[Any]:
        place, size = self._place, self.batch_size
        for batch in batches:
            position += size
            left = place.length - position
            ended = left <= 0 or (self.drop_last and left < size)
            if number == self._passes:
                place.epoch, place.position = (epoch + 1, 0) if ended else (epoch, position)
            yield batch
        # Less than a batch was left when the state was loaded, and drop_last leaves it out.
        if number == self._passes and place.epoch == epoch:
            place.epoch, place.position = epoch + 1, 0

    def _tell_epoch(self) -> None:
        """Tell the dataset the epoch, before worker processes copy it; not in advance: it may never come."""
        epoch = self._place.epoch
        if not self._listeners or self._told_epoch == epoch:
            return
        for listener in self._listeners:
            listener.set_epoch(epoch)
        self._told_epoch = epoch
        # Persistent workers hold copies of the dataset, which nobody can tell. Letting go of torch's iterator
        # ends them, and the next one starts others.
        self._iterator = None

    def _move(self, epoch: int, position: int) -> None:
        self._passes += 1  # an iterator that is still alive no longer moves the position
        self._loaded = False
        self._place.epoch, self._place.position = epoch, position

    def _identity(self) -> dict[str, object]:
        return {"items": self._place.length, "seed": self._place.seed, "shuffle": self._place.shuffle}


def build_loader(
    dataset: Dataset[Item] | Indexed[Item],
    batch_size: int,
    *,
    collate_fn: Callable[[list[Item]], Batch] | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    shuffle: bool = False,
    seed: int = 0,
) -> StatefulDataLoader:
    """A torchdata ``StatefulDataLoader`` for a map-style or iterable dataset.

    A map-style dataset gets a `ResumableDataLoader`: its order is computed as it goes, and its state has
    constant size. An iterable dataset keeps its own order and, if it has ``state_dict``, its own position;
    the loader is torchdata's as it is. Neither draws from the global random numbers of torch. Workers die
    with the process that iterates the loader (`dist_env.tie_loader_workers`).

    Args:
        dataset: Map-style (length and integer index; a list will do) or `torch.utils.data.IterableDataset`.
        batch_size: Items in a batch, at least 1.
        collate_fn: Items to batch; torch's default collation if None.
        num_workers: Worker processes, 0 to load in this process.
        drop_last: Leave out the last batch of an epoch if it is not full.
        pin_memory: Put tensors into page-locked memory.
        prefetch_factor: Batches that each worker prepares ahead; only with workers.
        persistent_workers: Keep the workers from one epoch to the next; only with workers.
        shuffle: Shuffle; only for a map-style dataset.
        seed: Seed of the order and of the workers; both are functions of (seed, epoch). For an iterable
            dataset, of the workers only: each pass draws theirs from a generator that begins with it.

    Returns:
        The loader.

    Raises:
        DataError: ``batch_size``, ``num_workers`` or ``prefetch_factor`` is out of range, the dataset is
            empty or has no full batch under ``drop_last``, ``shuffle`` is asked of an iterable dataset, or
            the dataset is a `DocumentStream`, which `StreamLoader` loads.
        TypeError: The dataset has no length, or ``seed`` is not an integer.
        ValueError: torch refuses a combination of worker options.
    """
    positive_batch_size(batch_size)
    check_workers(num_workers, prefetch_factor)
    if isinstance(dataset, DocumentStream):
        raise DataError(
            "build_loader does not load a DocumentStream, whose rows a position of its own orders; use "
            f"StreamLoader(dataset, {batch_size}, num_workers={num_workers})"
        )
    options: dict[str, object] = {
        "batch_size": batch_size,
        "collate_fn": collate_fn,
        "num_workers": num_workers,
        "drop_last": drop_last,
        "pin_memory": pin_memory,
        "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers,
    }
    if not isinstance(dataset, IterableDataset):
        sampler = _sampler(dataset, batch_size, drop_last, shuffle, seed)
        return tie_loader_workers(ResumableDataLoader(dataset, sampler, **options))
    if shuffle:
        raise DataError(
            "shuffle=True needs random access, which an iterable dataset has not; shuffle inside it"
        )
    with warnings.catch_warnings():
        _ignore_torchdata_warning()
        return tie_loader_workers(StatefulDataLoader(dataset, generator=_generator(seed), **options))


def _generator(seed: int) -> torch.Generator:
    """Random numbers of a loader's own: making an iterator draws one, also just to resume."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}; give an integer")
    return torch.Generator().manual_seed(seed % 2**63)


def _sampler(dataset: object, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> EpochSampler:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__} without length and index; give a map-style dataset, or "
            "derive it from torch.utils.data.IterableDataset"
        )
    length = len(dataset)
    if length == 0:
        raise DataError("dataset is empty; give at least one item")
    if drop_last and length < batch_size:
        raise DataError(
            f"drop_last=True leaves nothing of a dataset of {length} items with batch_size={batch_size}; "
            "set it to False or make the batch smaller"
        )
    return EpochSampler(length, shuffle, seed)


def _ignore_torchdata_warning() -> None:
    """torchdata 0.11 calls a function that torch 2.13 deprecates; users can do nothing about it."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
