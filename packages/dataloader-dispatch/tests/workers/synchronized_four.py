"""Four ranks with uneven data; rank 2 is killed at the end, while the others wait to begin a pass."""

from typing import Any

import torch
import torch.distributed as dist
from synchronized_parts import RANK, Batches, Log, SizedBatches, begin, lose, numbers, outcome

from dataloader_dispatch import SynchronizedDataLoader

COUNTS = (3, 5, 4, 6)


def lengths() -> Any:
    """Length under each rule, and without lengths."""
    sized = SizedBatches(COUNTS[RANK])
    told: list[Any] = [len(SynchronizedDataLoader(sized, "cpu", uneven=uneven)) for uneven in ("stop", "pad")]
    mixed = sized if RANK else Batches(3)
    return [*told, outcome(lambda: len(SynchronizedDataLoader(mixed, "cpu")))]


def left_out(log: Log) -> Any:
    """What is said about surplus batches, in two passes of loaders with and without a length."""
    log.taken()
    for kind in (SizedBatches, Batches):
        loader = SynchronizedDataLoader(kind(COUNTS[RANK]), "cpu")
        assert [numbers(loader), numbers(loader)] == [[0, 1, 2], [0, 1, 2]]
    return log.taken()


def same_first_batch(log: Log) -> Any:
    """What is said when ranks 0 and 2 have the same data, when all differ, and when batches are empty."""
    log.taken()
    told = []
    for batches in (Batches(2, rank=RANK % 2 if RANK != 3 else 3), Batches(2), Batches(0)):
        loader = SynchronizedDataLoader(batches, "cpu")
        numbers(loader)
        numbers(loader)
        told.append(log.taken())
    empty = [torch.empty(0, 2)]
    list(SynchronizedDataLoader(empty, "cpu"))
    return [*told, log.taken()]


def settings_differ() -> Any:
    """Ranks that were given different settings."""
    return [
        outcome(lambda: SynchronizedDataLoader([], "cpu", uneven="pad" if RANK == 1 else "stop")),
        outcome(lambda: SynchronizedDataLoader([], "cpu", uneven="wait")),  # type: ignore[arg-type]
    ]


def templates(log: Log) -> Any:
    """Dummies on ranks without a single batch, and batches that cannot be masked."""
    log.taken()
    loader = SynchronizedDataLoader(Batches(2 if RANK in (1, 3) else 0), "cpu", uneven="pad")
    got = []
    for batch in loader:
        got.append([batch["input_ids"].tolist(), batch["labels"].tolist(), loader.last_is_dummy])
        del batch["labels"]  # as users do
    said = log.taken()
    unmaskable = SynchronizedDataLoader([torch.tensor([RANK])] * (RANK + 1), "cpu", uneven="pad")
    own = SynchronizedDataLoader(
        [torch.tensor([RANK])] * (RANK + 1), "cpu", uneven="pad", make_dummy=lambda batch: batch - 50
    )
    return [got, said, outcome(lambda: list(unmaskable)), [int(batch) for batch in own]]


def subgroups() -> Any:
    """Two halves that know nothing of one another, beside a loader of all."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = SynchronizedDataLoader(SizedBatches(COUNTS[RANK]), "cpu", halves[RANK // 2])
    other = outcome(lambda: SynchronizedDataLoader([], "cpu", halves[1 - RANK // 2]))
    whole = SynchronizedDataLoader(Batches(COUNTS[RANK]), "cpu")
    return [[len(numbers(half)) for _ in range(2)], [len(numbers(half)) for _ in whole], other]


def main() -> None:
    begin()
    log = Log()
    note: dict[str, object] = {
        "lengths": lengths(),
        "left out": left_out(log),
        "same first batch": same_first_batch(log),
        "settings": settings_differ(),
        "templates": templates(log),
        "subgroups": subgroups(),
    }
    lose(2, 0, Batches(6), note)


main()
