"""A rank that reads from an address: writes down each batch with the position behind it, and may be killed.

Arguments: the address, worker processes, a folder for what it writes, a folder with the states to continue or
"-", and the batch after which it is killed, or 0.
"""

import json
import os
import signal
import sys
from pathlib import Path

from dataloader_dispatch import DocumentStream, StreamLoader, open_documents

address, workers, out, before, last = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def encode(text: str) -> list[int]:
    number = int(text)
    return [number + 1, *range(20_000, 20_000 + number % 23)]


stream = DocumentStream(
    open_documents(address),
    sequence_length=64,
    encode=encode,
    eos_token_id=0,
    seed=3,
    shards=24,
    rank=rank,
    world_size=world,
)
loader = StreamLoader(stream, 2, num_workers=int(workers))
if before != "-":
    states = [
        json.loads(path.read_text().splitlines()[-1])["state"] for path in sorted(Path(before).iterdir())
    ]
    loader.load_resharded(states, rank=rank, world_size=world)
with (Path(out) / f"{rank}.jsonl").open("w") as log:
    for number, batch in enumerate(loader, 1):
        print(
            json.dumps({"rows": batch["labels"].tolist(), "state": loader.state_dict()}), file=log, flush=True
        )
        if number == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
