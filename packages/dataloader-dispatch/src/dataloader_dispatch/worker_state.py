"""Worker processes between passes: their state comes back to this process, and they end when it is done."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from dataloader_dispatch.epochs import WRAPPED_LOADERS
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.loader import ResumableDataLoader


def sync_dataset_state_from_dataloader(loader: object) -> bool:
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
            "has no load_resharded(states, rank=, world_size=) to make one of them; add it, or set "
            "num_workers=1"
        )
    return True


def end_workers(loader: object, batches: object = None) -> None:
    """End the worker processes of a pass over a loader that is not taken to its end; the position stays.

    torch ends them when the pass is collected. A loader that keeps its iterator puts that off, and so does an
    exception, whose traceback holds it. A loader that has a method ``end_workers``, as the dispatcher has,
    does it by itself.

    Args:
        loader: Any loader, also one that wraps another, as in `sync_dataset_state_from_dataloader`.
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
        iterator._shutdown_workers()  # type: ignore[union-attr]
        if getattr(inner, "_iterator", None) is iterator:
            inner._iterator = None


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
            "the loader took its last snapshot of the workers some batches ago; set snapshot_every_n_steps=1"
        )
    workers = state["_snapshot"]["_worker_snapshots"].values()
    held = [worker.get("dataset_state") for worker in workers]
    return [one for one in held if one is not None]
