"""Bring the state that worker processes hold back to the dataset of the training process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from dataloader_dispatch.epochs import WRAPPED_LOADERS
from dataloader_dispatch.errors import DataError


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


def _innermost(loader: object) -> object:
    while not isinstance(loader, StatefulDataLoader):
        inner = next((getattr(loader, name) for name in WRAPPED_LOADERS if hasattr(loader, name)), None)
        if inner is None:
            break
        loader = inner
    return loader


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
