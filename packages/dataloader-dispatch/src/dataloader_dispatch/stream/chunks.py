"""Rows on their way from worker processes to the training process."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataloader_dispatch.stream.cursor import Place
from dataloader_dispatch.stream.document_stream import DocumentStream
from dataloader_dispatch.stream.packing import ShardRow
from dataloader_dispatch.stream.position import StreamPosition
from dist_env import tie_loader_workers

_CHUNK_ROWS = 16  # sending costs as much for one row as for several


class Delivery(NamedTuple):
    """A finished row.

    Attributes:
        row: Number of the row in its shard.
        shard: Number of the shard.
        behind: Where the shard stands behind the row.
        example: What the caller gets.
    """

    row: int
    shard: int
    behind: Place
    example: Mapping[str, torch.Tensor]


class Chunk(NamedTuple):
    """The rows of one worker that belong to the same few rounds; there may be none.

    Attributes:
        block: Number of these rounds.
        keys: int64 [rows, 7]: row, shard, and the place behind.
        examples: Each [rows, sequence length].
        left_out: Documents without tokens that the worker met since its last chunk.
    """

    block: int
    keys: torch.Tensor
    examples: dict[str, torch.Tensor]
    left_out: int


class ChunkedRows(IterableDataset[Chunk]):
    """What a worker process iterates: the rows of its shards, in chunks.

    Every worker sends the same blocks of rounds in the same order until its shards end. As a loader asks its
    workers in turn, the chunks of one block come together.
    """

    def __init__(self, stream: DocumentStream, workers: int) -> None:
        self._stream = stream
        position = stream.position
        self._first = position.first_row
        shards = -(-len(position.own_shards) // workers)
        self._rounds = max(1, _CHUNK_ROWS // max(1, shards))

    def forget(self) -> None:
        """Let go of the stream, of which the workers have copies by now."""
        del self._stream

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("ChunkedRows is for the worker processes of a loader")
        position = self._stream.position.part_of(worker.id, worker.num_workers)
        self._stream.encoder.left_out = 0  # what this process counted before it copied itself
        sent = 0
        for block, rows in groupby(self._stream.rows(position), self._block_of):
            for empty in range(sent, block):
                yield self._chunk(empty, [])
            yield self._chunk(block, list(rows))
            sent = block + 1
        yield self._chunk(sent, [])  # tells of documents behind the last row

    def _block_of(self, row: ShardRow) -> int:
        return (row.row - self._first) // self._rounds

    def _chunk(self, block: int, rows: list[ShardRow]) -> Chunk:
        keys = torch.tensor([[row.row, row.shard, *row.behind] for row in rows])
        keys = keys.reshape(-1, 2 + len(Place._fields))
        examples = [self._stream.example(row) for row in rows]
        names = examples[0] if examples else {}
        stacked = {name: torch.stack([example[name] for example in examples]) for name in names}
        encoder = self._stream.encoder
        left_out, encoder.left_out = encoder.left_out, 0
        return Chunk(block, keys, stacked, left_out)


def chunks_of_workers(stream: DocumentStream, workers: int, prefetch_factor: int | None) -> Iterator[Chunk]:
    """The chunks of worker processes, which end when this iterator does.

    Args:
        stream: The rows; from its position on.
        workers: Number of processes.
        prefetch_factor: Chunks that each prepares ahead.

    Raises:
        RuntimeError: A worker process died.
    """
    key, process = object(), os.getpid()
    _running[key] = _start(stream, workers, prefetch_factor)
    try:
        while (chunk := next(_running[key], None)) is not None:
            stream.encoder.left_out += chunk.left_out
            yield chunk
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker (pid"):  # and not an error that a worker passes on
            error.add_note(
                f"the data loader of {stream.position.owner} lost a worker process (num_workers={workers}); "
                "the system may have killed it for its memory. The position is behind the last batch "
                "received: load the state again, with fewer workers"
            )
        raise
    finally:
        # A worker process, a copy of this one, may collect this iterator too; the workers are not its own.
        if os.getpid() == process:
            _running.pop(key, None)


# torch's iterators wait 5 seconds for each worker if the garbage collector finds them in a cycle, or if they
# are still referenced when Python ends. Referenced from here alone they are deleted before either happens.
_running: dict[object, Iterator[Chunk]] = {}
atexit.register(_running.clear)


def _start(stream: DocumentStream, workers: int, prefetch_factor: int | None) -> Iterator[Chunk]:
    rows = ChunkedRows(stream, workers)
    # A generator of its own: making an iterator draws a seed, and would disturb the random numbers of a run
    # that makes one more because it resumed.
    loader: DataLoader[Chunk] = DataLoader(
        rows,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        generator=torch.Generator(),
    )
    chunks = iter(tie_loader_workers(loader))
    rows.forget()
    return chunks


def deliveries_here(stream: DocumentStream, position: StreamPosition) -> Iterator[Delivery]:
    """The rows from a position on, made in this process."""
    for row in stream.rows(position):
        yield Delivery(row.row, row.shard, row.behind, stream.example(row))


def deliveries_of(chunks: Iterable[Chunk]) -> Iterator[Delivery]:
    """The rows in the chunks of all workers, in the order they would have without workers."""
    for _, together in groupby(chunks, lambda chunk: chunk.block):
        unpacked = [delivery for chunk in together for delivery in _unpacked(chunk)]
        yield from sorted(unpacked, key=lambda delivery: delivery[:2])


def _unpacked(chunk: Chunk) -> Iterator[Delivery]:
    for number, (row, shard, *behind) in enumerate(chunk.keys.tolist()):
        example = {name: values[number] for name, values in chunk.examples.items()}
        yield Delivery(row, shard, Place(*behind), example)
