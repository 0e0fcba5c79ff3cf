"""Documents of which each can be told from the tokens of its row, and what one epoch gave of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from dataloader_dispatch import DocumentStream, StreamLoader

LENGTH = 8
DOCUMENTS = [[number] * (LENGTH - 1) for number in range(1, 42)]
"""With its separator, each is a row."""


def loader(batch_size: int = 2, *, rank: int | None = None, world_size: int | None = None) -> StreamLoader:
    size = (dist.get_world_size() if dist.is_initialized() else 1) if world_size is None else world_size
    own = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
    stream = DocumentStream(
        DOCUMENTS, sequence_length=LENGTH, eos_token_id=0, seed=1, shards=4, rank=own, world_size=size
    )
    return StreamLoader(stream, batch_size)


def numbers(batch: Any) -> list[int]:
    """The documents of a batch, without those that only fill it up."""
    kept = (batch["labels"] != -100).any(dim=1)
    return batch["input_ids"][kept, 0].tolist()


def over_ranks(seen: list[int]) -> Counter[int]:
    """How often each document came, on all ranks together."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    return Counter(number for one in every for number in one)


def mean_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(64, 4), torch.nn.Linear(4, 64))
