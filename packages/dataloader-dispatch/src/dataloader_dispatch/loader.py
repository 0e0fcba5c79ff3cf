"""Loaders of ordinary datasets: a resumable one, the epochs of their parts, their worker processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch.document_stream import DocumentStream
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.order import ShuffledIndex
from dataloader_dispatch.rows import position_state, saved_counts
from dataloader_dispatch.settings import below, check_epoch, check_workers, positive_batch_size
from dataloader_dispatch.torchdata_loaders import IterableLoader, ignore_torchdata_warning
from dist_env import get_logger, tie_loader_workers

Item_co = TypeVar("Item_co", covariant=True)
Item = TypeVar("Item")
Batch = TypeVar("Batch")

_logger = get_logger("dataloader_dispatch")

WRAPPED_LOADERS = ("loader", "dataloader", "base_dataloader")
"""Attributes under which loaders tell the loader that they wrap."""
_PARTS = (*WRAPPED_LOADERS, "batch_sampler", "sampler", "dataset", "datasets")
"""Also where `Subset`, `ConcatDataset`, `ChainDataset` and `StackDataset` keep what they are made of."""


class HasEpochs(Protocol):
    """A loader, or a part of one, that is told each epoch."""

    def set_epoch(self, epoch: int, /) -> object:
        """Go to the start of an epoch."""


def has_epochs(part: object) -> TypeGuard[HasEpochs]:
    """Whether it is told each epoch."""
    return callable(getattr(part, "set_epoch", None))


def set_loader_epoch(loader: Iterable[object] | None, epoch: int) -> None:
    """Tell a loader which epoch begins, or, where it has no ``set_epoch``, its parts that have one.

    Parts are dataset, batch sampler and samplers, those of a loader that this one wraps, and what a dataset
    such as `torch.utils.data.Subset` is made of. Each object is told once. An object that has ``set_epoch``
    passes the epoch on itself, so nothing behind it is told.

    Worker processes have copies of the dataset: call this before ``iter(loader)``. Persistent workers keep
    the copies of the first pass, of which a warning tells; only the loaders of this package begin them anew.

    Args:
        loader: Any loader; None where there is not one.
        epoch: The epoch, from 0.
    """
    for listener in epoch_listeners(loader):
        listener.set_epoch(epoch)


def epoch_listeners(loader: object) -> list[HasEpochs]:
    """What `set_loader_epoch` tells: of a loader, or of a dataset; each object once."""
    found: list[HasEpochs] = []
    _collect(loader, found, set())
    return found


def _collect(part: object, found: list[HasEpochs], seen: set[int]) -> None:
    if part is None or id(part) in seen:
        return
    seen.add(id(part))
    if has_epochs(part):
        found.append(part)
        return
    if isinstance(part, DataLoader):
        _warn_of_old_copies(part)
    for name in _PARTS:
        inner = getattr(part, name, None)
        several = inner.values() if isinstance(inner, Mapping) else inner
        for one in several if name == "datasets" and isinstance(several, Iterable) else (inner,):
            _collect(one, found, seen)


def _warn_of_old_copies(loader: DataLoader[Any]) -> None:
    """Say that the workers of a loader do not learn of the epoch, if they run and their dataset should."""
    # Private, in torch 2.11 to 2.13: the iterator that a loader with persistent workers keeps.
    if not loader.persistent_workers or getattr(loader, "_iterator", None) is None:
        return
    if epoch_listeners(loader.dataset):
        _logger.warning(
            "%s(persistent_workers=True): its workers keep the copies of %s that they began with, which are "
            "not told the epoch; set persistent_workers=False, or make the loader with build_loader, which "
            "starts workers anew where the epoch changes",
            type(loader).__name__,
            type(loader.dataset).__name__,
        )


class PassGenerator:
    """Random numbers for the passes over a torch loader that would draw them from the global ones of torch.

    A loader that is iterated behind its user's back, in a thread or at the first batch, would draw in between
    the numbers of a dropout. It gets generators, whose seeds are drawn where the user begins a pass: as many
    as torch draws in a process that iterates the loader itself, so that the order is the same.

    Args:
        loader: Any loader; one that is not a torch ``DataLoader``, or has a generator, is left alone.
    """

    def __init__(self, loader: object) -> None:
        self._loader: DataLoader[Any] | None = None
        self._samplers: list[Any] = []
        if isinstance(loader, DataLoader):
            self._loader = loader if loader.generator is None else None
            # A batch sampler of the user has a sampler of its own.
            parts = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
            found = {id(part): part for part in parts if getattr(part, "generator", self) is None}
            self._samplers = list(found.values())
        self._before_workers = torch.Generator().manual_seed(0).get_state()
        self._before_order = [self._before_workers] * len(self._samplers)
        self.renew()

    def draw(self) -> None:
        """Draw the numbers of the next pass from the global generator, which is used for nothing else."""
        if self._loader is not None:
            self._before_workers = torch.get_rng_state()
            _draw_seed()  # an iterator of torch (2.11 to 2.13) first draws the seed of its workers
        self._before_order = [_draw_order(sampler) for sampler in self._samplers]

    def renew(self) -> None:
        """Give the loader its generators, before it is iterated; a pass before keeps its own."""
        if self._loader is not None:
            self._loader.generator = _generator_at(self._before_workers)
        for sampler, state in zip(self._samplers, self._before_order, strict=True):
            sampler.generator = _generator_at(state)


def _draw_order(sampler: Any) -> torch.Tensor:
    """Draw from the global generator what a sampler without one draws; the state from which it is drawn."""
    if type(sampler) not in (SubsetRandomSampler, WeightedRandomSampler):
        return torch.Generator().manual_seed(_draw_seed()).get_state()  # as RandomSampler does
    before = torch.get_rng_state()
    alike = copy.copy(sampler)
    alike.generator = None
    next(iter(alike), None)  # draws the whole order
    return before


def _generator_at(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


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
        self._order()  # refuses a seed that is not an integer

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        return (order[position] for position in range(self.position, self.length))

    def _order(self) -> Sequence[int]:
        return ShuffledIndex(self.length, self.seed, self.epoch) if self.shuffle else range(self.length)


class Indexed(Protocol[Item_co]):
    """A map-style dataset: it has a length and is indexed by integers, as a list is."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> Item_co:
        """Item ``index``."""
        ...


def is_indexed(dataset: Dataset[Item] | Indexed[Item]) -> TypeGuard[Indexed[Item]]:
    """Whether a dataset is a map-style one."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class ResumableDataLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A `StatefulDataLoader` of a map-style dataset whose position is (epoch, items received).

    Made by `build_loader`. The state has a few numbers, resuming replays nothing, and another batch size or
    number of workers may continue it. Saved after the last batch of an epoch, it resumes at the start of the
    next epoch.

    As with torch's loaders each ``iter()`` begins the epoch anew; only the first one after
    `load_state_dict` begins at the loaded position. A pass that reaches the end makes the next epoch current.
    """

    def __init__(self, dataset: Indexed[Any], sampler: EpochSampler, **options: object) -> None:
        # A generator of its own: making an iterator draws a seed, and would disturb the random numbers of a
        # run that makes one more because it resumed.
        with warnings.catch_warnings():
            ignore_torchdata_warning()
            super().__init__(dataset, sampler=sampler, generator=torch.Generator(), **options)
        self._place = sampler
        self._listeners: list[HasEpochs] | None = None
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
    without one it is read again up to the position, which without workers batches of another size continue
    if they come to the same number of items. Neither draws from the global random numbers of torch. Workers
    die with the process that iterates the loader (`dist_env.tie_loader_workers`).

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
            "build_loader does not load a DocumentStream, whose rows a position of its own orders. Use "
            f"StreamLoader(dataset, {batch_size}, num_workers={num_workers})."
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
        if not is_indexed(dataset):
            raise TypeError(
                f"dataset is a {type(dataset).__name__} without length and index. Give a map-style dataset, "
                "or derive it from torch.utils.data.IterableDataset."
            )
        sampler = _sampler(dataset, batch_size, drop_last, shuffle, seed)
        return tie_loader_workers(ResumableDataLoader(dataset, sampler, **options))
    if shuffle:
        raise DataError(
            "shuffle=True needs random access, which an iterable dataset has not. Shuffle inside it."
        )
    with warnings.catch_warnings():
        ignore_torchdata_warning()
        return tie_loader_workers(IterableLoader(dataset, generator=_generator(seed), **options))


def _generator(seed: int) -> torch.Generator:
    """Random numbers of a loader's own: making an iterator draws one, also just to resume."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}. Give an integer.")
    return torch.Generator().manual_seed(seed % 2**63)


def _sampler(
    dataset: Indexed[Any], batch_size: int, drop_last: bool, shuffle: bool, seed: int
) -> EpochSampler:
    length = len(dataset)
    if length == 0:
        raise DataError("dataset is empty. Give at least one item.")
    if drop_last and length < batch_size:
        raise DataError(
            f"drop_last=True leaves nothing of a dataset of {length} items with batch_size={batch_size}. "
            "Set it to False or make the batch smaller."
        )
    return EpochSampler(length, shuffle, seed)


def sync_dataset_state_from_dataloader(loader: Iterable[object]) -> bool:
    """Copy the state of the datasets in a loader's worker processes into its dataset in this process.

    Worker processes hold the copies of a dataset that advance. Lengths and positions asked of the one in
    this process are right again after this, up to the batch received last. It looks through loaders that wrap
    another one and tell it as ``loader``, ``dataloader`` or ``base_dataloader``.

    Args:
        loader: Any loader; only a ``StatefulDataLoader`` with workers has something to copy.

    Returns:
        Whether a state was copied. False when the dataset advances in this process, keeps no state, or no
        batch was asked for yet.

    Raises:
        DataError: Several workers hold states and the dataset has no ``load_resharded`` to make one of them,
            or the loader takes snapshots too seldom to know the state behind the last batch.
    """
    inner = _innermost(loader)
    if not isinstance(inner, StatefulDataLoader) or inner.num_workers == 0:
        return False
    if inner._iterator is None and inner.next_iter_state is None:
        return False  # its state_dict() would start workers here and now, with the dataset as it is
    dataset: Any = inner.dataset
    states = _worker_states(inner.state_dict())
    if not states or not hasattr(dataset, "load_state_dict"):
        return False
    if len(states) == 1:
        dataset.load_state_dict(states[0])
    elif hasattr(dataset, "load_resharded"):
        rank, world_size = getattr(dataset, "rank", 0), getattr(dataset, "world_size", 1)
        dataset.load_resharded(states, rank=rank, world_size=world_size)
    else:
        raise DataError(
            f"the dataset is a {type(dataset).__name__}, of which {len(states)} workers hold states, and it "
            "has no load_resharded(states, rank=, world_size=) to make one of them. Add it, or set "
            "num_workers=1."
        )
    return True


def end_workers(loader: Iterable[object] | None, batches: Iterable[object] | None = None) -> None:
    """End the worker processes of a pass over a loader that is not taken to its end; the position stays.

    torch ends them when the pass is collected. A loader that keeps its iterator puts that off, and so does an
    exception, whose traceback holds it. A loader that has a method ``end_workers``, as the dispatcher has,
    does it by itself.

    Args:
        loader: Any loader, also one that wraps another, as in `sync_dataset_state_from_dataloader`; None
            where there is not one.
        batches: The pass, of which no more batches are taken; None if only the loader knows it.
    """
    if isinstance(batches, Generator):
        batches.close()
    inner: Any = loader
    while not hasattr(inner, "end_workers") and (wrapped := _wrapped(inner)) is not None:
        inner = wrapped
    if hasattr(inner, "end_workers"):
        inner.end_workers()
        return
    # Private, in torch 2.11 to 2.13 and torchdata 0.11: iterators of a DataLoader with workers, kept or not.
    for iterator in (batches, getattr(inner, "_iterator", None)):
        if not any(worker.is_alive() for worker in getattr(iterator, "_workers", ())):
            continue
        if isinstance(inner, StatefulDataLoader) and not isinstance(inner, ResumableDataLoader):
            # Its position is in the iterator. A worker that died cannot tell its own.
            with suppress(RuntimeError):
                inner.load_state_dict(inner.state_dict())
        if isinstance(iterator, _WithWorkers):
            iterator._shutdown_workers()
        if getattr(inner, "_iterator", None) is iterator:
            inner._iterator = None


@runtime_checkable
class _WithWorkers(Protocol):
    """An iterator of torch's or torchdata's loader with worker processes."""

    def _shutdown_workers(self) -> None: ...


def _innermost(loader: object) -> object:
    while (wrapped := _wrapped(loader)) is not None:
        loader = wrapped
    return loader


def _wrapped(loader: object) -> object | None:
    """The loader that a loader wraps; None if it wraps none."""
    if isinstance(loader, StatefulDataLoader):
        return None
    return next((getattr(loader, name) for name in WRAPPED_LOADERS if hasattr(loader, name)), None)


def _worker_states(state: Mapping[str, Any]) -> list[Mapping[str, object]]:
    """The state of the dataset in each worker, from the state of a ``StatefulDataLoader``."""
    if "_snapshot" not in state:
        return []
    if state["_steps_since_snapshot"]:
        raise DataError(
            "the loader took its last snapshot of the workers some batches ago. Set snapshot_every_n_steps=1."
        )
    workers = state["_snapshot"]["_worker_snapshots"].values()
    held = [worker.get("dataset_state") for worker in workers]
    return [one for one in held if one is not None]


def exact_length(loader: object) -> int | None:
    """The length of a loader; None if it has none, or only a guess."""
    # torch calls the length of a loader of an iterable dataset a guess.
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    return length_of(loader)


def length_of(loader: object) -> int | None:
    """The length of a loader; None if it has none."""
    if not hasattr(loader, "__len__"):
        return None
    try:
        return len(loader)
    except TypeError:  # A torch loader of an iterable dataset.
        return None
