"""Ranks that read one epoch of a stream together: `stream_ranks.py STOP [STATES]`.

After STOP steps, or at the end of the epoch, each rank notes the documents it saw and its position.
"""

import json
import os
import sys
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from dataloader_dispatch import DocumentStream, StreamLoader, SynchronizedDataLoader, TokenDocuments


def main(stop: int, states: str | None) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stream = DocumentStream(
        TokenDocuments([[number + 1] * (1 + number % 5) for number in range(997)]),
        sequence_length=16,
        eos_token_id=0,
        seed=4,
        shards=12,
        rank=rank,
        world_size=world_size,
    )
    loader = SynchronizedDataLoader(StreamLoader(stream, 2), "cpu", uneven="pad")
    if states is not None:
        saved = json.loads(Path(states).read_text())
        loader.load_resharded(saved, rank=rank, world_size=world_size)
    tokens: list[int] = []
    steps = 0
    for batch in islice(loader, stop):
        steps += 1
        tokens += [token for row in batch["labels"].tolist() for token in row if token > 0]
        dist.barrier()  # as a step of training would
    note = {"tokens": tokens, "state": loader.state_dict(), "steps": steps, "epoch": loader.epoch}
    Path(os.environ["NOTE"]).write_text(json.dumps(note))
    loader.close()
    dist.destroy_process_group()


main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
