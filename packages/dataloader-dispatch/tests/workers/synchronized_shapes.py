"""One rank of a job that lives on: a line of its input is a shape of data, a line of its output what came.

A loader is used again for the next shape of its kind, unless an error ended it.
"""

import faulthandler
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from synchronized_parts import RANK, WORLD_SIZE, begin, group_of

from dataloader_dispatch import EvaluationLoader, SynchronizedDataLoader


class Failure(Exception):
    """What a loader raises here."""


class Shape:
    """Batches of one row, which holds the rank and a number; with a length, right or wrong, or without."""

    count = 0
    claim: int | None = None
    fails_at: int | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.count):
            if number == self.fails_at:
                raise Failure(f"document {number} is bad")
            value = torch.tensor([[RANK, number]])
            yield {"input_ids": value, "labels": value.clone()}

    def __len__(self) -> int:
        if self.claim is None:
            raise TypeError("no length")
        return self.claim


def loader_of(kind: str, group: dist.ProcessGroup) -> tuple[Shape, Any]:
    shape = Shape()
    if kind == "evaluate":
        return shape, EvaluationLoader(shape, "cpu", group)
    return shape, SynchronizedDataLoader(shape, "cpu", group, kind)  # type: ignore[arg-type]


def read(loader: Any, group: dist.ProcessGroup, in_step: bool) -> dict[str, object]:
    """Read a pass to its end, with a collective in each step if ``in_step``."""
    numbers, dummies, error = [], 0, None
    try:
        for batch in loader:
            if isinstance(loader, EvaluationLoader):
                is_dummy, row = not batch.valid.any(), batch.batch["labels"][0]
            else:
                is_dummy, row = loader.last_is_dummy, batch["labels"][0]
                assert is_dummy == bool((row == -100).all())
            dummies += is_dummy
            if not is_dummy:
                numbers.append(int(row[1]))
            if in_step:
                dist.barrier(group)
    except Exception as caught:  # noqa: BLE001  # the test looks at it
        error = [type(caught).__name__, str(caught)]
    return {"numbers": numbers, "dummies": dummies, "error": error}


def main() -> None:
    begin()
    groups = {world: group_of(world) for world in range(1, WORLD_SIZE + 1)}
    loaders: dict[tuple[str, int], Any] = {}
    faulthandler.enable()
    answers = open(sys.argv[2], "w")  # noqa: PTH123, SIM115
    print("ready", file=answers, flush=True)
    for line in open(sys.argv[1]):  # noqa: PTH123, SIM115
        order = json.loads(line)
        kind, world = order["kind"], order["world"]
        if world > RANK and (kind, world) not in loaders:
            loaders[kind, world] = loader_of(kind, groups[world])
        answer: dict[str, object] = {}
        if world > RANK:
            shape, loader = loaders[kind, world]
            shape.count, shape.claim = order["counts"][RANK], order["claims"][RANK]
            shape.fails_at = order["fails_at"] if order["failing"] == RANK else None
            answer = read(loader, groups[world], order["in_step"])
        if order["is_error"]:
            loaders.pop((kind, world), None)
        print(json.dumps(answer), file=answers, flush=True)


main()
