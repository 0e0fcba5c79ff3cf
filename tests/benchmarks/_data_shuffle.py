"""Part (a) of the data benchmark: a shuffled order of n items, computed or stored.

Every contender is measured at every n in a process of its own, with one thread, in an order that moves on by
one each round. The first index is timed by the clock, with the making of the order, after the pages of memory
that this needs were touched; the others are timed in CPU seconds. Figures are medians over all processes and
repetitions. A contender that needs more than half of the machine's memory is left out.
"""

from __future__ import annotations

import gc
import json
import os
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, Protocol

import torch
from _timing import PeakMemory, Spread, normalise_pages, resident_bytes
from torch.utils.data import DistributedSampler, RandomSampler

from dataloader_dispatch import ShuffledIndex

LENGTHS = (10**6, 10**8, 10**10)
ROUNDS = 3
BLOCK = 2**17
AIMS = {"state_bytes": 128, "first_ms": 0.1, "block_ns": 15.0}
_SEED = 1234
_BLOCKS_PER_SAMPLE = 8
_INDICES_PER_SAMPLE = 200_000
_LOOK_UPS_PER_SAMPLE = 20_000
_REPETITIONS = 15
_MOST_FIRSTS = 50
_FIRSTS_SECONDS = 0.05
_MEMORY_SHARE = 0.5


class Order(Protocol):
    """A contender at one n. What it cannot do is None."""

    label: str
    bytes_per_item: int
    """Memory that it needs: 8 for a tensor; a list takes 8 more, and each Python int 32."""

    @abstractmethod
    def first(self) -> int:
        """Start the order and return its first index."""

    @abstractmethod
    def state(self) -> int:
        """Bytes that have to be saved to continue with the same order."""

    @abstractmethod
    def indices(self) -> Iterator[int]:
        """Go through the order index by index, after the first."""

    block: Callable[[int, int], torch.Tensor] | None
    look_up: Callable[[int], int] | None


class _Computed(Order):
    label = "dataloader-dispatch ShuffledIndex"
    bytes_per_item = 0

    def __init__(self, n: int) -> None:
        self._order = ShuffledIndex(n, _SEED)
        self.block = self._order.block
        self.look_up = self._order.__getitem__

    def first(self) -> int:
        return self._order[0]

    def state(self) -> int:
        order = self._order
        return len(json.dumps({"n": len(order), "seed": order.seed, "epoch": order.epoch}))

    def indices(self) -> Iterator[int]:
        return iter(self._order)


class _Drawn(Order):
    label = "torch RandomSampler"
    bytes_per_item = 48
    block = None
    look_up = None

    def __init__(self, n: int) -> None:
        self._generator = torch.Generator().manual_seed(_SEED)
        self._saved = self._generator.get_state()
        self._indices = iter(RandomSampler(range(n), generator=self._generator))

    def first(self) -> int:
        return next(self._indices)

    def state(self) -> int:
        return self._saved.numel()

    def indices(self) -> Iterator[int]:
        return self._indices


class _Distributed(Order):
    label = "torch DistributedSampler"
    bytes_per_item = 48
    block = None
    look_up = None

    def __init__(self, n: int) -> None:
        self._length = n
        self._sampler = DistributedSampler(range(n), num_replicas=1, rank=0, seed=_SEED)

    def first(self) -> int:
        self._indices = iter(self._sampler)
        return int(next(self._indices))

    def state(self) -> int:
        sampler = self._sampler
        return len(json.dumps({"n": self._length, "seed": sampler.seed, "epoch": sampler.epoch}))

    def indices(self) -> Iterator[int]:
        return self._indices


class _Kept(Order):
    label = "torch.randperm, kept"
    bytes_per_item = 8

    def __init__(self, n: int) -> None:
        self._order = torch.randperm(n, generator=torch.Generator().manual_seed(_SEED))
        # A copy, because whoever keeps a view keeps the whole order alive.
        self.block = lambda start, stop: self._order[start:stop].clone()
        self.look_up = lambda position: int(self._order[position])

    def first(self) -> int:
        return int(self._order[0])

    def state(self) -> int:
        return self._order.nbytes

    def indices(self) -> Iterator[int]:
        return chain.from_iterable(part.tolist() for part in self._order.split(BLOCK))


_CONTENDERS: tuple[type[_Computed | _Drawn | _Distributed | _Kept], ...] = (
    _Computed,
    _Drawn,
    _Distributed,
    _Kept,
)


@dataclass(frozen=True)
class Sample:
    """One contender at one n in one process: times of one index each and memory, by repetition.

    What a contender cannot do has no values.
    """

    first_ms: list[float]
    index_ns: list[float]
    block_ns: list[float]
    look_up_ns: list[float]
    peak_bytes: list[int]
    state_bytes: list[int]


def measure(lengths: Sequence[int] = LENGTHS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure all contenders at all lengths.

    Args:
        lengths: Numbers of items, n.
        rounds: Processes for each contender at each n.

    Returns:
        The method, and by contender and n (as text) the medians and all samples, or what memory is missing.
    """
    jobs = [(number, n) for n in lengths for number in range(len(_CONTENDERS))]
    samples: dict[tuple[int, int], list[Sample]] = {job: [] for job in jobs if _feasible(*job)}
    feasible = list(samples)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "dataloader_dispatch"])
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for number in range(rounds):
            shift = number % len(feasible)
            for job in feasible[shift:] + feasible[:shift]:
                sample = pool.submit(_sample, *job).result()
                samples[job].append(sample)
                print(f"shuffle, round {number + 1}/{rounds}: {_told(job, sample)}", flush=True)
    return {
        "rounds": rounds,
        "block": BLOCK,
        "aims": AIMS,
        "method": " ".join((__doc__ or "").split()),
        "peak_memory": PeakMemory.METHOD,
        "contenders": {
            contender.label: {str(n): _summary(samples, number, n) for n in lengths}
            for number, contender in enumerate(_CONTENDERS)
        },
    }


def _needed(number: int, n: int) -> int:
    return _CONTENDERS[number].bytes_per_item * n


def _feasible(number: int, n: int) -> bool:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _needed(number, n) <= _MEMORY_SHARE * memory


def _told(job: tuple[int, int], sample: Sample) -> str:
    number, n = job
    block = f", {Spread.of(sample.block_ns).median:.1f} ns by block" if sample.block_ns else ""
    return (
        f"{_CONTENDERS[number].label}, n = {n:.0e}: first {Spread.of(sample.first_ms).median:.3g} ms, "
        f"{Spread.of(sample.index_ns).median:.1f} ns per index{block}"
    )


def _summary(samples: dict[tuple[int, int], list[Sample]], number: int, n: int) -> dict[str, Any]:
    if (number, n) not in samples:
        return {"not_feasible_bytes": _needed(number, n)}
    rows = samples[number, n]
    summary: dict[str, Any] = {"samples": [asdict(row) for row in rows]}
    for name in Sample.__dataclass_fields__:
        values = [value for row in rows for value in getattr(row, name)]
        summary[name] = asdict(Spread.of(values)) if values else None
    return summary


def _sample(number: int, n: int) -> Sample:
    """Measure in this process, which has done nothing else."""
    torch.set_num_threads(1)
    contender = _CONTENDERS[number]
    small = contender(1000)
    small.first()
    _times(small, 1000)  # Whatever is made on first use is made now.
    normalise_pages(_needed(number, n), drop_caches=False)
    before = resident_bytes()
    with PeakMemory(above=before) as memory:
        order, first_ms = _first(contender, n)
        index_ns, block_ns, look_up_ns = _times(order, n)
    return Sample(
        first_ms=first_ms,
        index_ns=index_ns,
        block_ns=block_ns,
        look_up_ns=look_up_ns,
        peak_bytes=[] if memory.extra_bytes is None else [memory.extra_bytes],
        state_bytes=[order.state()],
    )


def _first(contender: Callable[[int], Order], n: int) -> tuple[Order, list[float]]:
    """An order, and milliseconds to its first index. What takes long is done once."""
    milliseconds: list[float] = []
    gc.collect()
    while sum(milliseconds) < _FIRSTS_SECONDS * 1e3 and len(milliseconds) < _MOST_FIRSTS:
        began = time.perf_counter()
        order = contender(n)
        order.first()
        milliseconds.append((time.perf_counter() - began) * 1e3)
    return order, milliseconds


def _times(order: Order, n: int) -> tuple[list[float], list[float], list[float]]:
    """Nanoseconds of one index after the first: one by one, by blocks, and at random positions."""
    indices = order.indices()
    count = min(_INDICES_PER_SAMPLE, (n - 1) // (_REPETITIONS + 1))
    deque(islice(indices, count), maxlen=0)
    index_ns = _nanoseconds(lambda _: deque(islice(indices, count), maxlen=0), count)
    block_ns: list[float] = []
    if order.block is not None:
        block = order.block
        size = min(BLOCK, n)
        blocks = min(_BLOCKS_PER_SAMPLE, n // size)

        def read_blocks(repetition: int) -> None:
            start = (n - blocks * size) * repetition // _REPETITIONS
            for at in range(start, start + blocks * size, size):
                block(at, at + size)

        block_ns = _nanoseconds(read_blocks, blocks * size)
    look_up_ns: list[float] = []
    if order.look_up is not None:
        look_up = order.look_up
        positions = [position * 7_919_777_777 % n for position in range(1, _LOOK_UPS_PER_SAMPLE + 1)]

        def look_all_up(_: int) -> None:
            for position in positions:
                look_up(position)

        look_up_ns = _nanoseconds(look_all_up, len(positions))
    return index_ns, block_ns, look_up_ns


def _nanoseconds(run: Callable[[int], object], count: int) -> list[float]:
    """CPU nanoseconds for one of ``count``, for each repetition."""
    nanoseconds = []
    for repetition in range(_REPETITIONS):
        began = time.process_time_ns()
        run(repetition)
        nanoseconds.append((time.process_time_ns() - began) / count)
    return nanoseconds


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table: medians, and in brackets the lowest figures, those of quiet moments."""
    table = [
        [
            "shuffled order",
            "n",
            "state bytes",
            "first index ms",
            "ns per index",
            f"by blocks of {result['block']}",
            "[i]",
            "peak extra MB",
        ]
    ]
    lengths = next(iter(result["contenders"].values()))
    for n in lengths:
        for label, by_length in result["contenders"].items():
            table.append([label, f"{int(n):.0e}", *_cells(by_length[n])])
    return table


def _cells(summary: dict[str, Any]) -> list[str]:
    if "not_feasible_bytes" in summary:
        return ["", f"not feasible: {summary['not_feasible_bytes']:,} bytes", "", "", "", ""]
    peak = summary["peak_bytes"]
    return [
        f"{summary['state_bytes']['median']:,}",
        f"{summary['first_ms']['median']:.3g} ({summary['first_ms']['low']:.3g})",
        _cell(summary["index_ns"]),
        _cell(summary["block_ns"]),
        _cell(summary["look_up_ns"]),
        "unknown" if peak is None else f"{peak['median'] / 1e6:.1f}",
    ]


def _cell(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.1f} ({spread['low']:.1f})"
