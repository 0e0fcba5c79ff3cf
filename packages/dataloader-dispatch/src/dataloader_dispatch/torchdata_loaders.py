"""Loaders of torchdata, whose position needs more than torchdata 0.11 does."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch.errors import DataError

Batch = TypeVar("Batch")


class IterableLoader(StatefulDataLoader):  # type: ignore[misc]  # torchdata has no types
    """A `StatefulDataLoader` of an iterable dataset, whose state tells the size of the batches it counts.

    torchdata 0.11 counts batches, and takes up a count of larger or smaller ones as it is.
    """

    def __iter__(self) -> Iterator[Any]:
        """The batches, or those that remain of a pass after a state was loaded."""
        skipped = _batches_to_skip(self)
        batches: Iterator[Any] = _without_skipped(super().__iter__(), skipped)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The state of torchdata, with the batch size and the number of workers."""
        skipped = _batches_to_skip(self)
        super().state_dict()  # makes the iterator of a state that was loaded and not begun
        _without_skipped(self._iterator, skipped)
        return {**super().state_dict(), **_kind_of_batches(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position, also of batches of another size where items can be counted.

        Raises:
            DataError: The state was saved with another number of workers, or with batches of another size
                whose items those of this one cannot make up.
        """
        super().load_state_dict(_in_batches_of(self, state_dict))


def begin_pass(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Begin a pass over any loader, as ``iter(loader)`` does, from which one of torchdata can be resumed.

    torchdata 0.11 counts the batches twice that it skips for an iterable dataset without a state: a run that
    was resumed twice skipped data. And where a loader has the generator of its sampler, a resume changed the
    order of all later epochs. The dispatcher, `SynchronizedDataLoader` and the trainers begin passes so.

    Args:
        loader: Any loader.
    """
    if not _is_plain(loader):
        return iter(loader)
    if (loader.next_iter_state or {}).get("_iterator_finished"):
        loader.state_dict()  # goes to the end of the pass that was saved, from where the next one begins
    _separate_generators(loader)
    skipped = _batches_to_skip(loader)
    batches: Iterator[Batch] = _without_skipped(iter(loader), skipped)
    return batches


def loader_state(loader: Any) -> Any:
    """The state of any loader; that of torchdata tells what batches it counts, where it counts no items.

    Args:
        loader: A loader with ``state_dict``, whose passes `begin_pass` began.
    """
    if not _is_plain(loader):
        return loader.state_dict()
    if loader._iterator is None:
        _separate_generators(loader)
    skipped = _batches_to_skip(loader)
    state = loader.state_dict()  # makes an iterator where there is none
    if not isinstance(loader.dataset, IterableDataset):
        return {**state, "batch_size": _batch_size(loader)} if _has_batch_sampler(loader) else state
    _without_skipped(loader._iterator, skipped)
    return {**loader.state_dict(), **_kind_of_batches(loader)}


def load_loader_state(loader: Any, state: Any) -> None:
    """Go to a position that `loader_state` gave; batches of another size continue where `build_loader` does.

    Args:
        loader: A loader with ``load_state_dict``.
        state: The position.

    Raises:
        DataError: The state counts batches of another kind, as in `build_loader`, or the loader refuses it.
    """
    counts = _is_plain(loader) and (isinstance(loader.dataset, IterableDataset) or _has_batch_sampler(loader))
    loader.load_state_dict(_in_batches_of(loader, state) if counts else state)


def ignore_torchdata_warning() -> None:
    """torchdata 0.11 calls a function that torch 2.13 deprecates; users can do nothing about it."""
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)


def _is_plain(loader: object) -> TypeGuard[StatefulDataLoader]:
    """Whether this is a loader of torchdata as a user makes it."""
    # Ours count by themselves: those of map-style datasets derive from it, too, and know epochs.
    is_ours = isinstance(loader, IterableLoader) or hasattr(loader, "set_epoch")
    return isinstance(loader, StatefulDataLoader) and not is_ours


# Private, in torchdata 0.11: `next_iter_state`, the state that the next iterator takes up; `_iterator`; and
# `_num_yielded` and `_snapshot` of that. If one changes, the tests of two resumes in a row fail.
def _batches_to_skip(loader: StatefulDataLoader) -> int:
    """Batches that the next iterator of this loader begins behind."""
    state = loader.next_iter_state
    if state is None or not isinstance(loader.dataset, IterableDataset):
        return 0
    snapshot = state.get("_snapshot")
    return int(state.get("_num_yielded", 0) if snapshot is None else snapshot["_snapshot_step"])


def _without_skipped(iterator: Any, skipped: int) -> Any:
    """Take back what an iterator has counted twice.

    Where the dataset has no state, torchdata 0.11 takes the loaded count and adds those batches once more as
    it skips them: the position saved next would be that many batches further.
    """
    if skipped and iterator._num_yielded >= 2 * skipped:
        iterator._num_yielded -= skipped
        snapshot = getattr(iterator, "_snapshot", None)
        if snapshot is not None:
            snapshot["_snapshot_step"] -= skipped
    return iterator


class _SeedsOfWorkers(torch.Generator):
    """Random numbers of which a loader draws the seed of the workers of each pass."""


def _separate_generators(loader: StatefulDataLoader) -> None:
    """Let a loader that shares the generator of its sampler draw the seed of workers from another one.

    ``StatefulDataLoader(shuffle=True, generator=generator)`` draws both from one generator. A resume goes
    back to where the order was drawn, so that every later epoch had another order.
    """
    source = getattr(loader.sampler, "generator", None)
    if source is None or not (loader.generator is source or isinstance(loader.generator, _SeedsOfWorkers)):
        return
    # A function of where the order stands, so that it is the same behind a resume.
    digest = hashlib.sha256(source.get_state().numpy().tobytes()).digest()
    loader.generator = _SeedsOfWorkers()
    loader.generator.manual_seed(int.from_bytes(digest[:7], "little"))


def _has_batch_sampler(loader: StatefulDataLoader) -> bool:
    """Whether a sampler of the user makes batches of indices; torchdata counts them if it has no state."""
    batches = loader.batch_sampler
    return loader.batch_size is None and batches is not None and not hasattr(batches, "state_dict")


def _batch_size(loader: StatefulDataLoader) -> int | None:
    source = loader if loader.batch_size is not None else loader.batch_sampler
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else None


def _kind_of_batches(loader: StatefulDataLoader) -> dict[str, Any]:
    return {"batch_size": loader.batch_size, "num_workers": loader.num_workers}


def _in_batches_of(loader: StatefulDataLoader, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved position as torchdata's own state, in batches of the size of this loader."""
    state, now = dict(saved), _batch_size(loader)
    size = state.pop("batch_size", now)
    workers = state.pop("num_workers", loader.num_workers)
    if state and workers != loader.num_workers:
        raise DataError(
            f"data position: it was saved with num_workers={workers}, and the loader has "
            f"num_workers={loader.num_workers}, but each worker has its own part of an iterable dataset. "
            f"Go back to {workers}."
        )
    sampled = _has_batch_sampler(loader)
    # One of a class of the user's own may not tell its size.
    counts = None not in (size, now) if sampled else not _tells_items(state)
    if size != now and not state.get("_iterator_finished") and counts:
        # With batch_size=None each item is a batch.
        items = state.get("_num_yielded", 0) * (size or 1)
        if "_num_yielded" not in state or items % (now or 1):
            what, fix = "iterable dataset", "give the iterator of the dataset state_dict and load_state_dict"
            if sampled:
                what, fix = "batch_sampler", "give the loader batch_size and a sampler in its place"
            raise DataError(
                f"data position: it was saved with batch_size={size}, and the loader has batch_size={now}. "
                f"The {what} has no state_dict, so its position is a number of batches, and of several "
                f"workers each has its own. Go back to that size, or {fix}."
            )
        state["_num_yielded"] = state["_sampler_iter_yielded"] = items // (now or 1)
    return state


def _tells_items(state: Mapping[str, Any]) -> bool:
    """Whether the dataset, or each worker's copy of it, has saved a position of its own."""
    snapshot = state.get("_snapshot")
    parts = [state] if snapshot is None else snapshot["_worker_snapshots"].values()
    return all(
        part.get("dataset_state") is not None
        or (part.get("fetcher_state") or {}).get("dataset_iter_state") is not None
        for part in parts
    )
