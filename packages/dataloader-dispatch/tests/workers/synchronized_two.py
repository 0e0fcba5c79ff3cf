"""Two ranks whose loaders have positions, epochs and worker processes; rank 1 is killed in a last pass."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from synchronized_parts import RANK, Batches, SizedBatches, begin, lose, numbers, outcome
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import DocumentStream, StreamLoader, SynchronizedDataLoader, build_loader

ITEMS = [{"input_ids": torch.tensor([i]), "labels": torch.tensor([i])} for i in range(16)]
SHARD = ITEMS[:5] if RANK == 0 else ITEMS[5:]


def counted() -> Any:
    """3 batches on rank 0 and 6 on rank 1; shuffled anew in each epoch."""
    return build_loader(SHARD, 2, shuffle=True, seed=RANK)  # type: ignore[arg-type]


def plain() -> Any:
    """The same of torchdata, which counts no epochs."""
    return StatefulDataLoader(SHARD, batch_size=2)


def stream() -> Any:
    """Rows of documents, without a length; rank 1 has the long ones."""
    documents = [[10 * i + 1] * (3 if i % 2 == 0 else 7) for i in range(8)]
    rows = DocumentStream(
        documents, sequence_length=4, eos_token_id=0, shards=4, rank=RANK, world_size=2, shuffle=False
    )
    return StreamLoader(rows, 1)


def contents(batch: dict[str, torch.Tensor]) -> list[int] | str:
    labels = batch["labels"].flatten().tolist()
    return "dummy" if set(labels) == {-100} else labels


def go_on(loader: SynchronizedDataLoader[Any], batches: int) -> list[list[int] | str]:
    """So many batches, over as many passes as it takes, which are broken off at the end."""
    got: list[list[int] | str] = []
    while len(got) < batches:
        for batch in loader:
            got.append(contents(batch))
            if len(got) == batches:
                break
    return got


def positions(make: Callable[[], Any], uneven: Any) -> Any:
    """Two epochs; and the same, stopped and resumed behind each batch of the first and behind its end."""
    whole = SynchronizedDataLoader(make(), "cpu", uneven=uneven)
    first = [contents(batch) for batch in whole]
    at_end = whole.state_dict()
    expected = first + [contents(batch) for batch in whole]
    differences = []
    for stop in range(len(first) + 1):
        stopped = SynchronizedDataLoader(make(), "cpu", uneven=uneven)
        before = go_on(stopped, stop)
        resumed = SynchronizedDataLoader(make(), "cpu", uneven=uneven)
        resumed.load_state_dict(stopped.state_dict())
        got = before + go_on(resumed, len(expected) - stop)
        if got != expected:
            differences.append([stop, got])
    resumed.load_state_dict(at_end)
    after = [contents(batch) for batch in resumed]
    if after != expected[len(first) :]:
        differences.append(["end", after])
    return {"first": first, "expected": expected, "differences": differences}


def epochs() -> Any:
    """Epochs as told while a pass is under way, and after it."""
    loader = SynchronizedDataLoader(counted(), "cpu")
    told = [loader.epoch]
    for _ in loader:
        told.append(loader.epoch)
    told.append(loader.epoch)
    loader.set_epoch(4)
    streamed = SynchronizedDataLoader(stream(), "cpu")
    progress = [streamed.epoch_progress for _ in streamed]
    return [told, loader.epoch, progress, streamed.epoch]


def broken_off() -> Any:
    """Passes that end early: a torch loader begins anew, a stream and an iterator continue."""
    sized, streamed = SynchronizedDataLoader(counted(), "cpu"), SynchronizedDataLoader(stream(), "cpu")
    once = SynchronizedDataLoader(iter(Batches(5)), "cpu")
    torch_like = [go_on(sized, 2), go_on(sized, 3), sized.epoch]
    rows = go_on(streamed, 2) + [contents(batch) for batch in streamed]
    old, new = iter(sized), iter(sized)
    next(old), next(new)
    superseded = outcome(lambda: next(old))
    one = next(iter(once))["labels"]
    return {
        "torch": torch_like,
        "rows": rows == [contents(batch) for batch in SynchronizedDataLoader(stream(), "cpu")],
        "iterator": [int(one[0, 1]), *numbers(once)],
        "superseded": superseded,
        "newer": len(list(new)),
    }


def side_by_side() -> Any:
    """A pass of another loader inside each step of a pass."""
    outer, inner = (
        SynchronizedDataLoader(Batches(2 + RANK), "cpu"),
        SynchronizedDataLoader(SizedBatches(3), "cpu"),
    )
    return [[numbers(inner)] for _ in outer]


def sampled() -> Any:
    """A torch loader with a distributed sampler, whose order changes with the epoch."""
    data = list(range(8))
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=True))  # type: ignore[arg-type]
    wrapped = SynchronizedDataLoader(loader, "cpu")
    got = []
    for epoch in range(2):
        wrapped.set_epoch(epoch)
        got.append(torch.cat(list(wrapped)).tolist())
    absent = [hasattr(wrapped, name) for name in ("state_dict", "load_state_dict", "epoch")]
    return [got, absent, wrapped.batch_size, wrapped.dataset == data, type(wrapped.sampler).__name__]


def random_numbers() -> Any:
    """A pass draws one seed where it begins, and nothing when its batches are fetched."""
    loader = SynchronizedDataLoader(StatefulDataLoader(SHARD, batch_size=2, shuffle=True), "cpu")
    states = []
    for _ in range(2):
        torch.manual_seed(RANK)
        batches = iter(loader)
        states += [torch.get_rng_state(), *(torch.get_rng_state() for _ in batches)]
    return [len(states), all(torch.equal(state, states[0]) for state in states)]


class Told(Dataset[int]):
    """More items on rank 1; remembers which epochs it was told of."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 4 + 2 * RANK

    def __getitem__(self, index: int) -> int:
        return 100 * self.epochs[-1] + 10 * RANK + index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def epochs_told() -> Any:
    """Each epoch once, though rank 1 leaves a surplus and goes on to the next epoch by itself."""
    data = Told()
    loader = SynchronizedDataLoader(build_loader(data, 2), "cpu")
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen.append(torch.cat(list(loader)).tolist())
    return [data.epochs, seen]


class Deadly(Dataset[int]):
    """On rank 1 an item kills the process that reads it; rank 0 is slow to begin."""

    def __init__(self, deadly: int, seconds: float) -> None:
        self.deadly = deadly
        self.seconds = seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 0 and RANK == 0:
            time.sleep(self.seconds)
        if index == self.deadly and RANK == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return 10 * RANK + index


def worker_death() -> Any:
    """A worker process of rank 1 dies, as it is waited for, and as its rank waits for the other one."""
    told = []
    for deadly, seconds in ((2, 0.0), (1, 1.0)):
        loader = SynchronizedDataLoader(DataLoader(Deadly(deadly, seconds), 1, num_workers=1), "cpu")
        told += [outcome(lambda: list(loader)), outcome(lambda: list(loader))]  # noqa: B023
    return told


def iterable_guess() -> Any:
    """A torch loader of an iterable dataset, whose length is a guess: too long on rank 0."""

    class Guess(torch.utils.data.IterableDataset[int]):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(10 * RANK, 10 * RANK + 2 + 2 * RANK))

    return torch.cat(list(SynchronizedDataLoader(DataLoader(Guess(), 1), "cpu"))).tolist()


def main() -> None:
    begin()
    note = {
        f"{make.__name__} {uneven}": positions(make, uneven)
        for make in (counted, plain, stream)
        for uneven in ("stop", "pad")
    }
    for scenario in (
        epochs,
        broken_off,
        side_by_side,
        sampled,
        random_numbers,
        epochs_told,
        worker_death,
        iterable_guess,
    ):
        note[scenario.__name__] = scenario()
    lose(1, 3, SizedBatches(6), note)


main()
