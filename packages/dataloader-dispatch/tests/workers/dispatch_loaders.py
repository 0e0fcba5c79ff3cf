"""Loaders, batches and helpers for the ranks that test the dispatcher."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def open_group() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def tell(note: object) -> None:
    """Hand a note to the test."""
    Path(os.environ["NOTE"]).write_text(json.dumps(note))


class Numbers:
    """Batches {"x": [number]} of an epoch, from a position of its own, which iterating continues from."""

    batch_size = 1

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.position = 0
        self.made = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.position < self.length:
            number = 1000 * self.epoch + self.position
            self.position += 1
            self.made += 1
            yield {"x": torch.tensor([number])}
        self.epoch, self.position = self.epoch + 1, 0

    @property
    def epoch_progress(self) -> float:
        return self.position / self.length

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Labelled:
    """A loader without state, of so many batches {"labels": [number]}; it may have none."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"labels": torch.tensor([number])} for number in range(self.length))


def marked_passes(loader: Any) -> list[list[Any]]:
    """Two passes: what `last_is_dummy` says before the first batch, then each label with it, then behind the
    end."""
    passes = []
    for _ in range(2):
        batches = iter(loader)
        marks: list[Any] = [loader.last_is_dummy]
        marks += [[int(batch["labels"]), loader.last_is_dummy] for batch in batches]
        passes.append([*marks, loader.last_is_dummy])
    return passes


class Pair(NamedTuple):
    left: Any
    right: Any


class Opaque:
    """A value that is not a container the dispatcher looks into."""

    def __init__(self, value: int) -> None:
        self.value = value


def mixed_batches() -> list[Any]:
    """Batches of every kind, each different from the one before."""
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(7, 5, generator=generator)
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    ]  # fmt: skip
    return [
        {str(dtype): (random * 5).to(dtype) for dtype in dtypes},
        [torch.tensor(3.5), torch.empty(0, 4), torch.empty(3, 0, dtype=torch.int16), torch.ones(1, 1, 1)],
        (random.t(), random[::2, 1:4], random[:1].expand(6, 5), random.to(torch.complex64).conj()),
        Pair({"deep": [{"er": (random, None)}]}, torch.nn.Parameter(random.clone())),
        {"grad": (random.clone().requires_grad_() * 2), "text": ["a", "b"], "n": 3, "flag": True, "f": 0.5},
        {"grad": (random.clone().requires_grad_() * 3), "text": ["a", "c"], "n": 4, "flag": False, "f": -0.5},
        collections.UserDict({"x": random, "inner": collections.OrderedDict(y=random + 1)}),
        {"set": {1, 2}, "array": random.numpy(), "scalar": random.numpy()[0, 0], "bytes": b"x"},
        {"set": {1, 3}, "array": random.numpy() + 1, "complex": 1j, "big": 10**30, "nothing": None},
        torch.arange(300_000),
        torch.arange(1_000_000, dtype=torch.float64),
        torch.arange(12),
        "no tensor at all",
        None,
        {},
        {0: torch.ones(2), (1, 2): torch.zeros(3)},
    ]


def opaque_batches() -> list[Any]:
    """Batches that only pickles can hold."""
    sparse = torch.eye(3).to_sparse()
    return [{"opaque": Opaque(number), "x": torch.ones(2), "sparse": sparse} for number in (5, 6)]


def same(left: Any, right: Any) -> bool:
    """Whether two batches are equal in types, structure and values."""
    if isinstance(left, torch.Tensor):
        if type(right) is not torch.Tensor or left.layout != right.layout or right.requires_grad:
            return False
        if left.layout is not torch.strided:
            left, right = left.to_dense(), right.to_dense()
        left = left.detach()
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        return bool(torch.equal(left.to(torch.complex128), right.to(torch.complex128)))
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Opaque):
        return left.value == right.value
    return bool((left == right).all()) if hasattr(left, "all") else bool(left == right)
