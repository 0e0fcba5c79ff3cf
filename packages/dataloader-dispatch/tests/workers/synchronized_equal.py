"""Four ranks, of which two each must have the same batches."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from synchronized_parts import NOTE, RANK, Log, SizedBatches, begin, numbers, outcome

from dataloader_dispatch import SynchronizedDataLoader

EQUAL = [(0, 1), (2, 3)]
PAIR = RANK // 2


class Changed(SizedBatches):
    """Other tokens from one of its batches on."""

    def __init__(self, count: int, changed_at: int) -> None:
        super().__init__(count, PAIR)
        self.changed_at = changed_at

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(super().__iter__()):
            batch["input_ids"] += 100 * (number >= self.changed_at)
            yield batch


class Unsent(SizedBatches):
    """With a value that cannot be compared."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            yield {**batch, "meta": object()}


class Positioned(SizedBatches):
    """Notes for which reader it takes the states of others."""

    def load_resharded(self, states: object, *, rank: int, world_size: int) -> None:
        self.reader = [rank, world_size]


def resharded() -> list[int]:
    batches = Positioned(1, PAIR)
    loader = SynchronizedDataLoader(batches, "cpu", equal_batches=EQUAL)
    loader.load_resharded([{}, {}], rank=RANK, world_size=4)
    return batches.reader


def read(batches: SizedBatches, uneven: Any = "stop", equal: Any = EQUAL) -> Any:
    return outcome(
        lambda: numbers(SynchronizedDataLoader(batches, "cpu", uneven=uneven, equal_batches=equal))
    )


begin()
log = Log()
other = RANK == 3
note = {
    "same": read(SizedBatches(4, PAIR)),
    "warned": log.taken(),
    "padded": read(SizedBatches(4 if PAIR else 2, PAIR), "pad"),
    "first": read(Changed(4, 0 if other else 9)),
    "third": read(Changed(4, 2 if other else 9)),
    "shorter": read(SizedBatches(3 if other else 4, PAIR)),
    "none": read(SizedBatches(0 if other else 4, PAIR), "pad"),
    "unsent": read(Unsent(4, PAIR)),
    "reader": resharded(),
    "sets": read(SizedBatches(4, PAIR), "stop", [] if other else EQUAL),
}
NOTE.write_text(json.dumps(note))
