"""Four ranks evaluate, together and in smaller groups."""

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from synchronized_parts import NOTE, RANK, WORLD_SIZE, Log, begin, group_of, outcome
from torch.utils.data import DataLoader, IterableDataset

from dataloader_dispatch import EvaluationLoader, GlobalMean, shard_for_evaluation

SHARDS = (85, 167, 239, 247)


def nine_samples() -> Any:
    """Mean loss and accuracy of nine samples, over the first 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(1)
    samples = [(x, i % 3) for i, x in enumerate(torch.randn(9, generator=generator))]
    return [_scores(samples, world) for world in range(1, WORLD_SIZE + 1)]


def _scores(samples: list[tuple[torch.Tensor, int]], world: int) -> list[float] | None:
    group = group_of(world)
    if world <= RANK:
        return None
    shard = shard_for_evaluation(samples, RANK, world)
    loss, accuracy = GlobalMean(group), GlobalMean(group)
    for scored in EvaluationLoader(DataLoader(shard, 2), "cpu", group):
        (x, label), valid = scored.batch, scored.valid
        dist.barrier(group)  # as a forward pass with collectives would
        loss.add((x.exp() - x)[valid].double().sum(), valid.sum())
        accuracy.add((label == 0)[valid].sum(), valid.sum())
    return [loss.compute(), accuracy.compute()]


class Rows(IterableDataset[int]):
    """Numbers without a length."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def uneven_shards() -> Any:
    """Iterations and scored items of shards of so many batches of 2 items, with and without a length."""
    starts = [2 * sum(SHARDS[:rank]) for rank in range(WORLD_SIZE)]
    items = range(starts[RANK], starts[RANK] + 2 * SHARDS[RANK] - 1)
    told = []
    for data in (items, Rows(items)):
        loader = EvaluationLoader(DataLoader(data, 2), "cpu")  # type: ignore[arg-type]
        scored, iterations, real = [], 0, 0
        for batch in loader:
            iterations += 1
            real += not batch.is_stand_in
            assert batch.valid.shape == batch.batch.shape
            assert batch.valid.dtype == torch.bool
            scored += batch.batch[batch.valid].tolist()
        told.append([iterations, real, scored == list(items)])
    return [*told, len(EvaluationLoader(DataLoader(items, 2), "cpu"))]  # type: ignore[arg-type]


def limits() -> Any:
    """Limits that differ between ranks: 2, 3, 4 and 5 batches of 20; in two passes."""
    loader = EvaluationLoader([torch.arange(3) + RANK] * 20, "cpu", max_batches=2 + RANK)
    return [[sum(not batch.is_stand_in for batch in loader), sum(1 for _ in loader)], len(loader)]


def some_empty(log: Log) -> Any:
    """Two items on four ranks: what each rank scores, and what is said."""
    log.taken()
    loader = EvaluationLoader(DataLoader(shard_for_evaluation([5, 6], RANK, WORLD_SIZE), 2), "cpu")
    mean = GlobalMean()
    seen = []
    for batch in loader:
        seen.append([batch.batch.tolist(), batch.valid.tolist()])
        mean.add(batch.batch[batch.valid].sum(), batch.valid.sum())
    return [seen, mean.compute(), log.taken()]


def nothing_to_score() -> Any:
    """Three items on four ranks in batches of 2, without those that are not full; and a mean of nothing."""
    shard = shard_for_evaluation([1, 2, 3], RANK, WORLD_SIZE)
    loader = EvaluationLoader(DataLoader(shard, 2, drop_last=True), "cpu")
    return [outcome(lambda: list(loader)), outcome(GlobalMean().compute)]


def without_rows() -> Any:
    """A batch without a size on rank 1."""
    batches: list[object] = ["words"] if RANK == 1 else [torch.tensor([RANK])]
    return outcome(lambda: list(EvaluationLoader(batches, "cpu")))


def missing() -> Any:
    """A mean that rank 3 does not come to."""
    mean = GlobalMean(timeout_seconds=1)
    mean.add(1.0, 1)
    return None if RANK == 3 else outcome(mean.compute)


def main() -> None:
    begin()
    log = Log()
    note = {
        "nine samples": nine_samples(),
        "uneven shards": uneven_shards(),
        "limits": limits(),
        "some empty": some_empty(log),
        "nothing": nothing_to_score(),
        "without rows": without_rows(),
        "missing": missing(),
    }
    NOTE.write_text(json.dumps(note))
    dist.barrier()


main()
