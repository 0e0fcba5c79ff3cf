"""One epoch of a stream that changes hands: `stream_handover.py`, four ranks.

Two ranks read shards of their own, then rank 0 reads for all four, then each of the four its own shards, then
rank 0 for two, to the end. Each change is in the middle of the epoch. The ranks note what they saw of it.
"""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch import (
    DataloaderDispatcher,
    DocumentStream,
    StreamLoader,
    SynchronizedDataLoader,
    TokenDocuments,
    build_loader,
)

STEPS = 6

dist.init_process_group("gloo")
rank = dist.get_rank()
two, four = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])


def stream_loader(rank: int = 0, world_size: int = 1) -> StreamLoader:
    documents = TokenDocuments([[number + 1] * (1 + number % 5) for number in range(997)])
    stream = DocumentStream(
        documents,
        sequence_length=16,
        eos_token_id=0,
        seed=4,
        shards=12,
        rank=rank,
        world_size=world_size,
    )
    return StreamLoader(stream, 2)


def own(group: dist.ProcessGroup) -> SynchronizedDataLoader[Any]:
    """Each rank of a group reads shards of its own."""
    loader = stream_loader(dist.get_rank(group), dist.get_world_size(group))
    return SynchronizedDataLoader(loader, "cpu", group, uneven="pad")


def dispatched(world_size: int) -> DataloaderDispatcher[Any]:
    """Rank 0 reads for the first ranks."""
    loader = stream_loader() if rank == 0 else None
    return DataloaderDispatcher(loader, mesh(world_size), "cpu", uneven="pad", prefetch=2)


def mesh(world_size: int) -> DeviceMesh:
    return DeviceMesh.from_group(two if world_size == 2 else four, "cpu", torch.arange(world_size))


def read(loader: Any, world_size: int, steps: int | None = STEPS) -> list[Any]:
    """Read some steps, note their tokens, and tell everyone the states."""
    state = None
    if rank < world_size:
        taken: Iterable[dict[str, torch.Tensor]] = itertools.islice(loader, steps)
        batches = [batch["labels"].flatten().tolist() for batch in taken]
        tokens.append([token for labels in batches for token in labels if token > 0])
        state = loader.state_dict()
        epochs.append(loader.epoch)
        loader.close()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, state)
    return states[:world_size]


tokens: list[list[int]] = []
epochs: list[int] = []

states = read(own(two) if rank < 2 else None, 2)

loader = dispatched(4)
loader.load_resharded(states if rank == 0 else None, rank=0, world_size=1)
states = read(loader, 4)

shards = own(four)
shards.load_resharded([state for state in states if state], rank=rank, world_size=4)
states = read(shards, 4)

last = dispatched(2) if rank < 2 else None
if last is not None:
    last.load_resharded([*states, {}], rank=rank, world_size=2)  # a rank of a dispatcher saves an empty state
read(last, 2, None)

plain = DataloaderDispatcher(build_loader(list(range(9)), 1, shuffle=True), mesh(4), "cpu")
divisible = hasattr(plain, "load_resharded")
plain.close()

note = {"tokens": tokens, "epochs": epochs, "divisible": divisible}
Path(os.environ["NOTE"]).write_text(json.dumps(note))
dist.destroy_process_group()
