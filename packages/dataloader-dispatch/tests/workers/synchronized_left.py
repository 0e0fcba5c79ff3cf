"""Two ranks leave passes in the middle: what was read ahead comes once, and an error is not forgotten."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from synchronized_parts import NOTE, RANK, begin, outcome
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.nodes import IterableWrapper, Loader

from dataloader_dispatch import SynchronizedDataLoader, build_loader, end_workers


def item(number: int) -> Tensor:
    return torch.tensor([number])


class OwnIterator:
    """A loader that is its own iterator, and has a position."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.number == 6:
            raise StopIteration
        self.number += 1
        return item(self.number - 1)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Generated:
    """A loader that is one generator, without a position; that of rank 1 fails in its third batch."""

    def __init__(self) -> None:
        self.batches = self.generate()

    def generate(self) -> Iterator[Tensor]:
        for number in range(6):
            if number == 2 and RANK == 1:
                raise OSError("the disk is gone")
            yield item(number)

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches


class Counting(IterableDataset[Tensor]):
    """A dataset that keeps its position in the worker."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.number < 8:
            self.number += 1
            yield item(self.number - 1)
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def taken(loader: SynchronizedDataLoader[Any], batches: int = -1) -> list[int]:
    """So many batches, or all; then the pass is broken off."""
    got = []
    for batch in loader:
        got.append(int(batch))
        if len(got) == batches:
            break
    return got


def broken_off(loader: Any) -> Any:
    """Two batches, and a new pass."""
    whole = SynchronizedDataLoader(loader, "cpu", uneven="stop")
    return [taken(whole, 2), outcome(lambda: taken(whole))]


def persistent() -> Any:
    numbers = [item(number) for number in range(6)]
    loader: DataLoader[Any] = DataLoader(numbers, None, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    return broken_off(loader)


def own_iterator() -> Any:
    return broken_off(OwnIterator())


def nodes() -> Any:
    return broken_off(Loader(IterableWrapper([item(number) for number in range(6)])))


def error_read_ahead() -> Any:
    return broken_off(Generated())


def workers_ended() -> Any:
    """Two batches, the end of the workers, and the rest."""
    loader = SynchronizedDataLoader(build_loader(Counting(), 1, num_workers=1), "cpu")  # type: ignore[arg-type]
    batches = iter(loader)
    first = [int(next(batches)) for _ in range(2)]
    end_workers(loader, batches)
    return [first, taken(loader)]


def workers_of_a_plain_loader() -> Any:
    numbers = [item(number) for number in range(20)]
    plain: DataLoader[Any] = DataLoader(numbers, None, num_workers=1)  # type: ignore[arg-type]
    before = set(multiprocessing.active_children())
    loader = SynchronizedDataLoader(plain, "cpu")
    batches = iter(loader)
    next(batches)
    begun = len(set(multiprocessing.active_children()) - before)
    end_workers(loader, batches)
    limit = time.monotonic() + 20
    while (left := set(multiprocessing.active_children()) - before) and time.monotonic() < limit:
        time.sleep(0.05)
    return [begun, len(left)]


class Unspeakable(Exception):
    def __str__(self) -> str:
        return self.nothing  # type: ignore[attr-defined, no-any-return]


def unspeakable() -> Any:
    """An error of rank 1 whose text raises."""

    def generate() -> Iterator[Tensor]:
        yield item(0)
        if RANK == 1:
            raise Unspeakable
        yield item(1)

    loader = SynchronizedDataLoader(generate(), "cpu", uneven="stop")  # type: ignore[arg-type]
    try:
        return outcome(lambda: taken(loader))
    except AttributeError:  # the text of the error raises here, too
        return ["Unspeakable", ""]


def closed_early() -> Any:
    """Rank 1 is slow with its third batch, and both leave before: closing waits for nobody."""

    def generate() -> Iterator[Tensor]:
        yield item(0)
        yield item(1)
        if RANK == 1:
            time.sleep(16)
        yield item(2)

    loader = SynchronizedDataLoader(generate(), "cpu", uneven="stop")  # type: ignore[arg-type]
    # Rank 1 may find that rank 0 has closed; the next scenario begins when it has its batches, or knows.
    batches = iter(loader)
    got = outcome(lambda: [int(batch) for batch in islice(batches, 2)])
    start = time.monotonic()
    loader.close()
    seconds = time.monotonic() - start
    return [got, seconds, outcome(lambda: iter(loader)), outcome(lambda: next(batches))]


def no_dummy() -> Any:
    """Rank 0 has no data, and fails to make a batch that stands in."""

    def generate() -> Iterator[Any]:
        for number in range(RANK * 3):
            yield {"input_ids": item(number), "labels": item(number)}

    def fail(batch: object) -> object:
        if RANK == 0:
            raise ValueError("no dummy here")
        return batch

    got: list[object] = []

    def train() -> None:
        loader = SynchronizedDataLoader(generate(), "cpu", uneven="pad", make_dummy=fail)  # type: ignore[arg-type]
        got.extend(batch for batch in loader)

    return [outcome(train), len(got)]


def main() -> None:
    begin()
    note = {}
    for scenario in (
        persistent,
        own_iterator,
        nodes,
        error_read_ahead,
        workers_ended,
        workers_of_a_plain_loader,
        unspeakable,
        closed_early,
        no_dummy,
    ):
        note[scenario.__name__] = scenario()
    NOTE.write_text(json.dumps(note))
    dist.destroy_process_group()


main()
