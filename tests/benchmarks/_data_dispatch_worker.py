"""One rank of the dispatch benchmark."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from dataloader_dispatch import DataloaderDispatcher

Batch = dict[str, torch.Tensor]

BATCH_SIZE, SEQUENCE_LENGTH = 8, 512
NAMES = ("input_ids", "labels", "position_ids")
READY = 16
"""Distinct batches, which come again and again."""
COST_SECONDS = 0.005
WARM_UP = 24
STEPS = {
    "free": {"sharded": 3000, "dispatcher": 2000, "accelerate": 400, "pickled": 300},
    "made": dict.fromkeys(("sharded", "dispatcher", "accelerate", "pickled"), 200),
    "made and used": dict.fromkeys(("sharded", "dispatcher", "accelerate", "pickled"), 200),
}
SMOKE_STEPS = 8


class Maker:
    """Collate function: items 8k to 8k + 7 become batch k, after what it costs to make one."""

    def __init__(self, cost_seconds: float) -> None:
        self.cost_seconds = cost_seconds
        shape = (BATCH_SIZE, SEQUENCE_LENGTH)
        self.ready = [{name: torch.full(shape, number) for name in NAMES} for number in range(READY)]

    def __call__(self, items: list[int]) -> Batch:
        if self.cost_seconds:
            time.sleep(self.cost_seconds)
        return self.ready[items[0] // BATCH_SIZE % READY]


def loader(batches: int, cost: float, workers: int, first: int = 0, step: int = 1) -> DataLoader[int]:
    """Batches ``first``, ``first + step`` and so on, as many as asked for."""
    numbers = range(first, first + batches * step, step)
    items = [number * BATCH_SIZE + row for number in numbers for row in range(BATCH_SIZE)]
    return DataLoader(items, BATCH_SIZE, num_workers=workers, collate_fn=Maker(cost))  # type: ignore[arg-type]


@contextmanager
def sharded(batches: int, cost: float, workers: int) -> Iterator[Iterable[Batch]]:
    yield loader(batches, cost, workers, rank, world)


@contextmanager
def dispatcher(batches: int, cost: float, workers: int) -> Iterator[Iterable[Batch]]:
    source = loader(batches * world, cost, workers * world) if rank == 0 else None
    with closing(DataloaderDispatcher(source, mesh, "cpu")) as dispatched:
        yield dispatched


@contextmanager
def accelerate(batches: int, cost: float, workers: int) -> Iterator[Iterable[Batch]]:
    from accelerate.data_loader import prepare_data_loader

    yield prepare_data_loader(
        loader(batches * world, cost, workers * world if rank == 0 else 0),
        torch.device("cpu"),
        num_processes=world,
        process_index=rank,
        put_on_device=True,
        dispatch_batches=True,
    )


@contextmanager
def pickled(batches: int, cost: float, workers: int) -> Iterator[Iterable[Batch]]:
    def receive() -> Iterator[Batch]:
        source = iter(loader(batches * world, cost, workers * world)) if rank == 0 else None
        for _ in range(batches):
            box: list[Any] = [list(islice(source, world)) if source is not None else None]
            dist.broadcast_object_list(box, src=0)
            yield box[0][rank]

    yield receive()


CONTENDERS: dict[str, Callable[[int, float, int], Any]] = {
    "sharded": sharded,
    "dispatcher": dispatcher,
    "accelerate": accelerate,
    "pickled": pickled,
}


def speed(name: str, scenario: str, steps: int) -> float:
    """Batches a second that all ranks together receive."""
    cost = 0.0 if scenario == "free" else COST_SECONDS
    use = COST_SECONDS if scenario == "made and used" else 0.0
    with CONTENDERS[name](WARM_UP + steps, cost, 0 if scenario == "free" else 1) as batches:
        received = iter(batches)
        consume(received, 0, WARM_UP, use)
        dist.barrier()
        start = time.perf_counter()
        consume(received, WARM_UP, WARM_UP + steps, use)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if next(received, None) is not None:
            raise ValueError(f"{name} gave more batches than the loader has")
    return world * steps / float(seconds)


def consume(batches: Iterator[Batch], first: int, last: int, use: float) -> None:
    """Take the batches of some steps, and check that they are the right ones."""
    for step in range(first, last):
        batch = next(batches)
        number = (step * world + rank) % READY
        if any(int(batch[name][-1, -1]) != number for name in NAMES):
            raise ValueError(f"step {step} on rank {rank} brought another batch than number {number}")
        if use:
            time.sleep(use)


def measure(options: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Every contender once in each round, in an order that moves on by one each round."""
    names = options["contenders"]
    speeds: dict[str, dict[str, list[float]]] = {case: {name: [] for name in names} for case in STEPS}
    for number in range(options["rounds"]):
        shift = number % len(names)
        for case, steps in STEPS.items():
            for name in names[shift:] + names[:shift]:
                speeds[case][name].append(speed(name, case, SMOKE_STEPS if options["smoke"] else steps[name]))
    return speeds


if __name__ == "__main__":
    torch.set_num_threads(1)
    # For everyone: a loader that receives from many workers pays for every tensor, and by descriptors twice.
    torch.multiprocessing.set_sharing_strategy("file_system")
    options = json.loads(sys.argv[1])
    if "accelerate" in options["contenders"]:
        from accelerate import PartialState

        PartialState(cpu=True)  # It opens the process group, and its loaders ask it for the ranks.
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    found = measure(options)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
