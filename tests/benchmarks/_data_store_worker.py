"""Reads one epoch of documents from a store, by one contender; prints what it took as one line of JSON.

    python _data_store_worker.py CONTENDER ADDRESS CACHE WORKERS

It runs in the environment of its contender, and imports nothing of the others. Every contender gives the
token ids of all documents once, in a shuffled order, as int64 tensors in batches; their sum shows that none
is missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

BATCH = 8
LENGTH = 1024


def ours(address: str, cache: str, workers: int) -> Iterator[tuple[int, int]]:
    """Rows of 1024 tokens with labels, packed; the number of documents is that of the source."""
    from dataloader_dispatch import DocumentStream, StreamLoader, open_documents

    source = open_documents(address, text_column="tokens", cache_dir=cache)
    stream = DocumentStream(source, sequence_length=LENGTH, eos_token_id=None, seed=1)
    documents = len(source)
    for batch in StreamLoader(stream, BATCH, num_workers=workers):
        kept = batch["labels"][batch["labels"] != -100]
        yield documents, int(kept.sum())
        documents = 0


def _batches(dataset: Any, workers: int) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=list)


def mosaic(address: str, cache: str, workers: int) -> Iterator[tuple[int, int]]:
    """Documents of MosaicML Streaming, whose shards are downloaded whole and kept."""
    import numpy as np
    import torch
    from streaming import StreamingDataset

    dataset = StreamingDataset(remote=address, local=cache, shuffle=True, shuffle_seed=1, batch_size=BATCH)
    for batch in _batches(dataset, workers):
        tokens = [torch.from_numpy(one["tokens"].astype(np.int64)) for one in batch]
        yield len(batch), sum(int(one.sum()) for one in tokens)


def datasets(address: str, cache: str, workers: int) -> Iterator[tuple[int, int]]:
    """Documents of Hugging Face `datasets`, streamed from Parquet and shuffled within a buffer."""
    import torch
    from datasets import load_dataset

    store = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    dataset = load_dataset(
        "parquet",
        data_files=[f"{address}/part-{number:05d}.parquet" for number in range(8)],
        split="train",
        streaming=True,
        storage_options=store,
        cache_dir=cache,
    )
    for batch in _batches(dataset.shuffle(seed=1, buffer_size=1000), workers):
        tokens = [torch.tensor(one["tokens"]) for one in batch]
        yield len(batch), sum(int(one.sum()) for one in tokens)


def write_mosaic(folder: str, tokens: str) -> None:
    """Write documents from a file of numpy arrays as shards of MosaicML Streaming."""
    from itertools import pairwise

    import numpy as np
    from streaming import MDSWriter

    stored = np.load(tokens)
    values, ends = stored["tokens"], stored["ends"]
    with MDSWriter(out=folder, columns={"tokens": "ndarray:uint16"}, size_limit=1 << 23) as writer:
        for start, stop in pairwise(ends):
            writer.write({"tokens": values[start:stop]})


CONTENDERS = {"tokens": ours, "parquet": ours, "mosaic": mosaic, "datasets": datasets}


def main(contender: str, address: str, cache: str, workers: str) -> None:
    """Read, and print."""
    if contender == "write-mosaic":
        write_mosaic(address, cache)
        return
    import torch

    torch.set_num_threads(1)
    begin = time.perf_counter()
    first = documents = total = 0.0
    for count, tokens in CONTENDERS[contender](address, cache, int(workers)):
        first = first or time.perf_counter() - begin
        documents += count
        total += tokens
    seconds = time.perf_counter() - begin
    print(json.dumps({"first": first, "seconds": seconds, "documents": int(documents), "sum": int(total)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
