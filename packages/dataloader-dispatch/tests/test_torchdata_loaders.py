"""Loaders of torchdata that a user makes, and those of `build_loader` that derive from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from dataloader_dispatch import DataError, DataloaderDispatcher, SynchronizedDataLoader, build_loader

EPOCHS = 3
Wrap = Callable[[Any], Any]
WRAPPED: dict[str, Wrap] = {
    "dispatched": lambda loader: DataloaderDispatcher(loader, None, "cpu", None),
    "synchronized": lambda loader: SynchronizedDataLoader(loader, "cpu"),
}

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Streamed(IterableDataset[int]):
    """Without a position of its own; each worker has a part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, 10, step))


class Seeds:
    """Items that tell their index and the seed of their pass."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        return index + 100 * ((worker.seed - worker.id) % 1000 if worker else 0)


def drawn(workers: int) -> StatefulDataLoader:
    """Draws with replacement, 32 indices at a time."""
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(Seeds(), replacement=True, num_samples=70, generator=generator)
    return StatefulDataLoader(Seeds(), 20, num_workers=workers, sampler=sampler, generator=generator)


LOADERS: dict[str, Callable[[int], Any]] = {
    "streamed": lambda workers: StatefulDataLoader(Streamed(), 2, num_workers=workers),
    "shuffled": lambda workers: StatefulDataLoader(
        Seeds(), 16, num_workers=workers, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "drawn": drawn,
}


def epochs_resumed_at_each_batch(build: Callable[[], Any], asks_twice: bool) -> list[list[list[int]]]:
    """The batches of some epochs, of which each comes from a loader that was made and resumed for it."""
    epochs: list[list[list[int]]] = [[]]
    state = None
    while True:
        loader = build()
        if state is not None:
            loader.load_state_dict(state)
            if asks_twice:
                loader.state_dict()
        for batch in loader:
            epochs[-1].append(batch.tolist())
            break
        else:
            if len(epochs) == EPOCHS:
                return epochs
            epochs.append([])
        state = copy.deepcopy(loader.state_dict())


@pytest.mark.parametrize("asks_twice", [False, True])
@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", LOADERS)
def test_a_resume_at_each_batch_leaves_all_epochs_as_they_are(name: str, wrap: str, asks_twice: bool) -> None:
    def build() -> Any:
        return WRAPPED[wrap](LOADERS[name](0))

    loader = build()
    whole = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
    assert epochs_resumed_at_each_batch(build, asks_twice) == whole


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", LOADERS)
def test_to_ask_for_the_position_before_the_first_pass_changes_nothing(name: str, wrap: str) -> None:
    loader, asked = (WRAPPED[wrap](LOADERS[name](0)) for _ in range(2))
    asked.state_dict()
    for _ in range(EPOCHS):
        assert [batch.tolist() for batch in asked] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize("name", ["streamed", "shuffled"])
def test_a_resume_at_each_batch_with_workers(name: str) -> None:
    def build() -> Any:
        return DataloaderDispatcher(LOADERS[name](1), None, "cpu", None)

    loader = build()
    whole = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
    assert len({tuple(batch) for epoch in whole for batch in epoch}) > len(whole[0]) or name == "streamed"
    assert epochs_resumed_at_each_batch(build, asks_twice=False) == whole


@pytest.mark.parametrize("asks_twice", [False, True])
def test_the_loader_that_is_made_for_an_iterable_dataset_resumes_as_often_as_it_likes(
    asks_twice: bool,
) -> None:
    def build() -> Any:
        return build_loader(Streamed(), 2)

    whole = [[batch.tolist() for batch in build()]] * EPOCHS
    assert epochs_resumed_at_each_batch(build, asks_twice) == whole


@pytest.mark.parametrize("wrap", WRAPPED)
def test_batches_of_another_size_continue_with_the_next_item_or_are_refused(wrap: str) -> None:
    loader = WRAPPED[wrap](StatefulDataLoader(Streamed(), 2))
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    state = copy.deepcopy(loader.state_dict())
    larger = WRAPPED[wrap](StatefulDataLoader(Streamed(), 3))
    larger.load_state_dict(state)
    assert seen + [batch.tolist() for batch in larger] == [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9]]
    with pytest.raises(DataError, match="saved with batch_size=2, and the loader has batch_size=4"):
        WRAPPED[wrap](StatefulDataLoader(Streamed(), 4)).load_state_dict(state)
    with pytest.raises(DataError, match="saved with num_workers=0, and the loader has num_workers=1"):
        WRAPPED[wrap](StatefulDataLoader(Streamed(), 2, num_workers=1)).load_state_dict(state)


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_batch_sampler_of_another_size_continues_with_the_next_item_or_is_refused(wrap: str) -> None:
    def build(size: int, workers: int = 0) -> Any:
        batches = BatchSampler(SequentialSampler(range(10)), size, drop_last=False)
        return WRAPPED[wrap](StatefulDataLoader(range(10), batch_sampler=batches, num_workers=workers))

    loader = build(2)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(3)]
    state = copy.deepcopy(loader.state_dict())
    for size, rest in ((3, [[6, 7, 8], [9]]), (2, [[6, 7], [8, 9]])):
        other = build(size)
        other.load_state_dict(state)
        assert seen + [batch.tolist() for batch in other] == [[0, 1], [2, 3], [4, 5], *rest]
    with pytest.raises(DataError, match=r"batch_size=4\. The batch_sampler has no state_dict"):
        build(4).load_state_dict(state)
