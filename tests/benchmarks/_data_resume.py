"""Part (b) of the data benchmark: what it costs to resume at a position, and to get the first batch there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from _timing import Spread
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dataloader_dispatch import DocumentStream, StreamLoader, build_loader

POSITIONS = (10**3, 10**4, 10**5, 10**6, 10**7)
WORKERS = (0, 2)
BATCH = 8
ROUNDS = 5
_DOCUMENTS = 2 * 10**8
_LENGTH = 128
_SLOW_MS = 100.0
# A replay at these positions takes minutes.
_REPLAY_LIMIT = {0: 10**5, 2: 10**4}
_PERMUTATION_LIMIT = 10**6

Resume = Callable[[], object]


class Documents:
    """As many documents as wanted, each made when it is asked for."""

    def __len__(self) -> int:
        return _DOCUMENTS

    def __getitem__(self, index: int, /) -> torch.Tensor:
        return torch.full((96,), 1 + index % 1000)

    def fingerprint(self) -> str:
        return "made up"


class Rows(Dataset[torch.Tensor]):
    """A map-style dataset with one row for each document."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_LENGTH,), 1 + index % 1000)


class Replayed(IterableDataset[torch.Tensor]):
    """An iterable dataset without a state, which a loader can only read again from the start."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        row = torch.zeros(_LENGTH, dtype=torch.int64)
        while True:
            yield row


def _our_stream(position: int, workers: int) -> Resume:
    stream = DocumentStream(Documents(), sequence_length=_LENGTH, eos_token_id=0, seed=1)
    state = stream.state_dict()
    rows = position * BATCH // stream.shards
    state["places"] = [
        [(rows * _LENGTH // 97) * stream.shards + shard, 5, rows] for shard in range(stream.shards)
    ]

    def resume() -> object:
        loader = StreamLoader(stream.reader(), BATCH, num_workers=workers)
        loader.load_state_dict(state)
        return next(iter(loader))

    return resume


def _our_map(position: int, workers: int) -> Resume:
    rows = Rows(_DOCUMENTS)
    state = {**build_loader(rows, BATCH, shuffle=True).state_dict(), "position": position * BATCH}

    def resume() -> object:
        loader = build_loader(rows, BATCH, shuffle=True, num_workers=workers)
        loader.load_state_dict(state)
        return next(iter(loader))

    return resume


def _their_loader(dataset: Dataset[Any], shuffle: bool | None, position: int, workers: int) -> Resume:
    """The state after two batches, with its counts set to the position: reading up to there is not timed."""
    make = partial(StatefulDataLoader, dataset, batch_size=BATCH, shuffle=shuffle, num_workers=workers)
    loader = make()
    batches = iter(loader)
    next(batches)
    next(batches)  # of the last worker, as after any even number of batches
    state = _moved(loader.state_dict(), position)

    def resume() -> object:
        loader = make()
        loader.load_state_dict(state)
        return next(iter(loader))

    return resume


def _moved(state: dict[str, Any], position: int) -> dict[str, Any]:
    """A torchdata state as it is after ``position`` batches."""
    for name, value in state.items():
        if isinstance(value, dict):
            _moved(value, position)
        elif name in ("samples_yielded", "_sampler_iter_yielded", "_num_yielded", "_snapshot_step"):
            state[name] = position * (BATCH if name == "samples_yielded" else 1)
    return state


def _contenders(position: int, workers: int) -> dict[str, Resume]:
    contenders = {
        "DocumentStream, packed and shuffled": _our_stream(position, workers),
        "build_loader, map-style, shuffled": _our_map(position, workers),
    }
    if position <= _PERMUTATION_LIMIT:
        rows = Rows(2 * position * BATCH)
        contenders["StatefulDataLoader, map-style, shuffled"] = _their_loader(rows, True, position, workers)
    if position <= _REPLAY_LIMIT[workers]:
        contenders["StatefulDataLoader, iterable without state"] = _their_loader(
            Replayed(), None, position, workers
        )
    return contenders


def measure(rounds: int = ROUNDS, positions: Sequence[int] = POSITIONS) -> dict[str, Any]:
    """Milliseconds from a saved state to the first batch, by contender, workers and batches before it.

    Contenders take turns within a round, with the best of three in a row for those below 100 ms; medians,
    smallest and largest of all rounds.
    """
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"batch_size": BATCH, "documents": _DOCUMENTS, "milliseconds": {}}
    for workers in WORKERS:
        for position in positions:
            contenders = _contenders(position, workers)
            samples: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name, resume in contenders.items():
                    samples[name].append(_milliseconds(resume))
            for name, values in samples.items():
                spread = Spread.of(values)
                told = {"median": spread.median, "low": spread.low, "high": spread.high}
                by_workers = result["milliseconds"].setdefault(name, {}).setdefault(str(workers), {})
                by_workers[str(position)] = told
            print(f"resume: {workers} workers at batch {position:,} measured", flush=True)
    return result


def _milliseconds(resume: Resume) -> float:
    """The best of three in a row, so that a fast one does not pay for what a slow one left in the caches."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        resume()
        best = min(best, (time.perf_counter() - began) * 1e3)
        if best > _SLOW_MS:
            break
    return best


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table of `measure`'s result."""
    positions = [
        str(position)
        for position in POSITIONS
        if any(str(position) in told for name in result["milliseconds"].values() for told in name.values())
    ]
    table = [["first batch after a resume, ms", "workers", *(f"at {int(p):.0e}" for p in positions)]]
    for name, by_workers in result["milliseconds"].items():
        for workers, told in by_workers.items():
            cells = [f"{told[at]['median']:.2f}" if at in told else "-" for at in positions]
            table.append([name, workers, *cells])
    return table
