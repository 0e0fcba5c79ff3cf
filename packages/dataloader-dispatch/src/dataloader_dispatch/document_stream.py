"""Documents to token rows of one length and to batches, with a position that can be saved."""

from __future__ import annotations

import atexit
import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataloader_dispatch.document_encoder import DocumentEncoder
from dataloader_dispatch.documents import DocumentSource, TextUnit, data_fingerprint
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.order import epoch_order
from dataloader_dispatch.read_ahead import DocumentsAhead, read_ahead_of
from dataloader_dispatch.rows import (
    Cursor,
    Place,
    StreamPacker,
    StreamPosition,
    StreamRow,
    finished_row,
    rows_in_turn,
)
from dataloader_dispatch.settings import (
    RowSpan,
    check_divided_once,
    check_encode,
    check_settings,
    check_source,
    check_takers,
    check_workers,
    checked_spans,
    logical_streams,
    positive_batch_size,
)
from dist_env import tie_loader_workers

logger = logging.getLogger("dataloader_dispatch.stream")

_CHUNK_ROWS = 16  # sending costs as much for one row as for several


class DocumentStream(IterableDataset[dict[str, torch.Tensor]]):
    """Token rows of one length, packed across documents, shared among ranks and workers.

    The documents of an epoch are laid end to end, each followed by one separator, and cut into rows of
    ``sequence_length`` tokens. A long document spans rows, a row may hold several documents. Documents
    without tokens are left out, and get no separator. Every token of every document comes exactly once an
    epoch, over all ranks together.

    Iterating yields the rows that remain of the current epoch for this rank. A row is a dict of int64 tensors
    of shape [sequence_length]:

    - ``input_ids``;
    - ``labels``: the same, not shifted, and -100 where the last row of a shard is padded;
    - with ``boundaries=True`` also ``position_ids``, which count from 0 in each document, or piece of one, of
      the row; and ``document_ids``, which number these pieces from 0 and are -1 in padding: a
      token may attend to those with its own number.

    **Logical shards.** Shard k of n holds the documents k, k + n, k + 2 n, ... of the epoch's order. The
    shards are packed one by one and give their rows in turn, so that a batch is not about one subject. Rank r
    of W delivers the shards r, r + W, ..., and divides them among its workers. What is in a row depends on
    neither, and wherever W divides n, the ranks' rows of one step are the same rows for every W, up to the
    end of the first shard. The last row of each shard may be padded.

    **Position.** Epoch, and for each shard three numbers: its document, the tokens of it that are used up,
    and the rows given. A row begins where the shard's row before it ended, so the tail that is carried from
    one row into the next is in the state as the place where it begins. The state has the same size
    wherever it is, and restoring it reads one document of each shard. It advances with each row delivered.

    **Other ranks.** Each rank saves its own state. The same number of ranks loads them again one by one. For
    another number give all of them to `load_resharded`: every document still comes exactly once in the epoch.

    **End of an epoch.** A single rank is at the start of the next epoch when its last row is delivered. With
    several ranks others may have rows left, so the position stays at the end of the epoch until the iterator
    is exhausted; a state saved there continues with no row of that epoch, and then the next one.

    An iterator that is given up leaves the position behind the last row it delivered, and a new
    ``iter()`` continues from there. Only the newest iterator is valid; asking an older one for a row, or one
    made before the position was set by hand, raises RuntimeError.

    For batches and worker processes use `StreamLoader`. Under torchdata's ``StatefulDataLoader`` each worker
    delivers its part of the shards and keeps its part of the position; that loader needs the same number
    of workers to continue. It makes new workers for each epoch, which begin where the dataset of this process
    is: call `sync_dataset_state_from_dataloader` after each epoch. Leave ``persistent_workers`` off: rows
    that such workers prepared are lost when an iterator is given up, or an ended epoch's state is loaded.

    Args:
        source: Texts or token ids; see `DocumentSource`. `mix_documents` makes one of several.
        sequence_length: Tokens in a row, at least 2.
        encode: Text to token ids; required for texts, not allowed for token ids. It may return a
            sequence of ints, bytes, or a 1-D integer tensor.
        eos_token_id: Separator behind each document. One that the encoder, or the document, has at its
            edges already is not doubled, and that is said. None: no separator.
        seed: Seed of the order of documents; the order is a function of (seed, epoch).
        shuffle: False keeps the order of the source in every epoch.
        drop_last: Leave out the last row of a shard if it is not full. Its tokens are not seen then.
        pad_token_id: Input token where the last row of a shard is padded.
        shards: Logical shards, at most one a document; one document of each is held in memory. None: 64, or
            fewer so that each has 16 documents. Fixed for a run: a multiple of every number of ranks times
            workers that may be used is best.
        rank: This rank among those that share the documents.
        world_size: Number of these ranks.
        boundaries: Add ``position_ids`` and ``document_ids``.
        skip: Rows to leave out, where training went wrong on them. May change from one start to the next.

        text_unit: The most text that ``encode`` looks at as a whole: a ``"character"``, a ``"word"`` (with
            the white space before it), or the ``"document"``. Large texts are encoded in pieces of 262,144
            characters, cut between units, so that memory does not grow with them and a resume begins with
            a piece. The tokens are the same: a cut is made only where those of the text around it
            are, and without one the text stays whole. None: ``"character"`` for ``str.encode``, ``"word"``
            for the ``encode`` of a Hugging Face tokenizer that divides texts into words, else
            ``"document"``; then a warning names the first text of more than 16 million characters.

    Raises:
        DataError: A setting is out of range, there is no document, or there are more ranks than shards.
    """

    def __init__(
        self,
        source: DocumentSource,
        *,
        sequence_length: int,
        encode: Callable[[str], Sequence[int] | torch.Tensor] | None = None,
        eos_token_id: int | None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        pad_token_id: int = 0,
        shards: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        boundaries: bool = False,
        skip: Sequence[RowSpan] = (),
        text_unit: TextUnit | None = None,
    ) -> None:
        check_settings(sequence_length, eos_token_id, pad_token_id, seed)
        check_source(source)
        check_encode(encode)
        self.source = source
        self.sequence_length = sequence_length
        self.eos_token_id = eos_token_id
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad_token_id = pad_token_id
        self.boundaries = boundaries
        self.skip = checked_spans(skip)
        documents = len(epoch_order(source, seed, 0, shuffle))
        self.shards = logical_streams(shards, documents, rank, world_size)
        self.encoder = DocumentEncoder(source, encode, eos_token_id, text_unit)
        identity, accepts = self._identity(documents), self.encoder.accepts
        self.position = StreamPosition(self.shards, documents, rank, world_size, identity, accepts)

    @property
    def rank(self) -> int:
        """This rank among those that share the documents."""
        return self.position.owner.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share the documents."""
        return self.position.owner.world_size

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self.position.cursor.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of this rank's documents of the epoch that are behind the position, from 0 to 1."""
        return self.position.progress

    @property
    def left_out(self) -> int:
        """Documents without tokens met so far, in this process and the workers of a `StreamLoader`.

        They are empty, or the source leaves them out because they cannot be read. One met in two epochs, or
        again after a position was loaded, counts twice.
        """
        return self.encoder.left_out

    def reader(self, epoch: int = 0) -> DocumentStream:
        """The same rows with a position of their own, at the start of an epoch."""
        other = copy.copy(self)
        other.position = self.position.copy()
        other.position.move(Cursor.start(epoch, self.shards))
        return other

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already.

        Raises:
            DataError: ``epoch`` is negative.
        """
        self.position.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The position behind the last row delivered, and what it has a meaning for. Fit for JSON."""
        return self._position_here().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position that this rank saved, or a single rank for all.

        Raises:
            DataError: The state was saved with other data or settings, by another rank, or is damaged. The
                position is unchanged then.
        """
        self._position_here().load_state_dict(state)

    def load_resharded(
        self, states: Sequence[Mapping[str, object]], /, *, rank: int, world_size: int
    ) -> None:
        """Go to the position that another number of ranks, or of workers, saved together.

        Args:
            states: The states of all of them, in any order.
            rank: That of this stream.
            world_size: That of this stream.

        Raises:
            DataError: The states are not those of all ranks of one moment, or belong to other data or
                settings. The position is unchanged then.
        """
        self._position_here().load_resharded(states, rank, world_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rows that remain of the current epoch.

        Raises:
            DataError: A document cannot be read or encoded, or the epoch holds no row. The position stays
                behind the last row delivered.
            DataError: Accelerate would divide the rows of one of several ranks among all ranks once more.
            RuntimeError: The iterator is not the newest one.
        """
        check_divided_once(self.world_size)
        position = self._position_here()
        return self._deliver(position, position.begin())

    def rows(self, position: StreamPosition) -> Iterator[StreamRow]:
        """The rows that remain at a position, in order; the position does not move.

        Raises:
            DataError: A document cannot be read or encoded.
        """
        cursor = position.cursor.copy()
        order = epoch_order(self.source, self.seed, cursor.epoch, self.shuffle)
        ahead = None
        if (told := read_ahead_of(self.source)) is not None:
            places = {shard: cursor.places[shard].document for shard in position.own_streams}
            ahead = DocumentsAhead(told, order, self.shards, places)
        packer = StreamPacker(self.encoder, order, self.shards, self.sequence_length, self.drop_last, ahead)
        for row in rows_in_turn(packer, position.own_streams, cursor.places):
            number = row.row * self.shards + row.shard
            spans = [span for span in self.skip if span.holds(cursor.epoch, number)]
            if not spans:
                yield row
            elif any(span.stop is None for span in spans):
                return  # rows come in the order of their numbers

    def example(self, row: StreamRow) -> dict[str, torch.Tensor]:
        """What iterating yields for a row."""
        return finished_row(row, self.sequence_length, self.pad_token_id, self.boundaries)

    def say_empty(self, position: StreamPosition) -> None:
        """Refuse an epoch from whose start on there is no row.

        Raises:
            DataError: This is the only rank. With several, the others may have rows, and a warning is logged.
        """
        epoch = position.cursor.epoch
        # A span that leaves the first row leaves some of an epoch that has any.
        skipped = any(span.holds(epoch, 0) for span in self.skip)
        if skipped or not position.cursor.at_start(position.own_streams):
            return
        held = "no text"
        if self.drop_last:
            held = f"fewer than sequence_length={self.sequence_length} tokens, and drop_last leaves them out"
        if position.owner.world_size * position.owner.workers == 1:
            raise DataError(f"no row can be made: the {len(self.source)} documents hold {held}.")
        logger.warning("%s has no row: its shards of the documents hold %s", position.owner, held)

    def _deliver(self, position: StreamPosition, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        rows = self.rows(position)
        following = next(rows, None)
        if following is None:
            self.say_empty(position)
        over = False
        while following is not None:
            row, following = following, next(rows, None)
            example = self.example(row)  # before the position moves: what fails here comes again
            over = position.advance(iteration, [(row.shard, row.behind)], ended=following is None)
            yield example
        if not over:
            position.finish(iteration)

    def _position_here(self) -> StreamPosition:
        """The position of this process: a worker process of a loader has a part of the rank's shards."""
        worker = get_worker_info()
        if worker is not None and self.position.owner.workers != worker.num_workers:
            check_takers(self.shards, self.world_size, worker.num_workers)
            self.position = self.position.part_of(worker.id, worker.num_workers)
        return self.position

    def _identity(self, documents: int) -> dict[str, object]:
        return {
            "documents": documents,
            "fingerprint": data_fingerprint(self.source),
            "encoding": self.encoder.fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "eos_token_id": self.eos_token_id,
            "shards": self.shards,
        }


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

    It goes through a pipe as it is. torch would hand over each tensor as a file descriptor, for which the two
    processes make a connection and prove a secret to one another, and that takes longer than to copy it.

    Attributes:
        block: Number of these rounds.
        keys: Row, shard, and the place behind, of each row.
        examples: Each [rows, sequence length].
        left_out: Documents without tokens that the worker met since its last chunk.
    """

    block: int
    keys: list[tuple[int, ...]]
    examples: dict[str, np.ndarray[Any, Any]]
    left_out: int


def _as_it_is(chunk: Any) -> Any:
    """In place of torch's conversion, which would make tensors of arrays before they travel."""
    return chunk


class ChunkedRows(IterableDataset[Chunk]):
    """What a worker process iterates: the rows of its shards, in chunks.

    Every worker sends the same blocks of rounds in the same order until its shards end. As a loader asks its
    workers in turn, the chunks of one block come together.
    """

    def __init__(self, stream: DocumentStream, workers: int) -> None:
        self._stream = stream
        position = stream.position
        self._first = position.first_row
        shards = -(-len(position.own_streams) // workers)
        self._rounds = max(1, _CHUNK_ROWS // max(1, shards))

    def forget(self) -> None:
        """Let go of the stream, of which the workers have copies by now."""
        del self._stream

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("ChunkedRows is for the worker processes of a loader.")
        position = self._stream.position.part_of(worker.id, worker.num_workers)
        self._stream.encoder.left_out = 0  # what this process counted before it copied itself
        sent = 0
        for block, rows in groupby(self._stream.rows(position), self._block_of):
            for empty in range(sent, block):
                yield self._chunk(empty, [])
            yield self._chunk(block, list(rows))
            sent = block + 1
        yield self._chunk(sent, [])  # tells of documents behind the last row

    def _block_of(self, row: StreamRow) -> int:
        return (row.row - self._first) // self._rounds

    def _chunk(self, block: int, rows: list[StreamRow]) -> Chunk:
        keys: list[tuple[int, ...]] = [(row.row, row.shard, *row.behind) for row in rows]
        examples = [self._stream.example(row) for row in rows]
        names = examples[0] if examples else {}
        stacked = {name: np.stack([example[name].numpy() for example in examples]) for name in names}
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
    try:
        # A worker may die while others are still being started.
        _running[key] = _start(stream, workers, prefetch_factor)
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
        collate_fn=_as_it_is,
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
    examples = {name: torch.from_numpy(values) for name, values in chunk.examples.items()}
    for number, (row, shard, *behind) in enumerate(chunk.keys):
        example = {name: values[number] for name, values in examples.items()}
        yield Delivery(row, shard, Place(*behind), example)


class StreamLoader:
    """Batches of the rows of a `DocumentStream`, on the CPU.

    Iterating yields the batches that remain of the current epoch for this rank: the entries of a row, each
    int64 of shape [B, S] with B = ``batch_size``, fewer in the last batch of an epoch, and S =
    ``sequence_length``. There is no length: how many rows an epoch has is known when its documents have been
    read.

    The rows come in the same order whatever ``num_workers`` is. The state counts what the caller received,
    not what workers prepared: saved after batch k, it resumes at batch k + 1. It holds neither batch size nor
    number of workers, so others may continue it.

    Args:
        dataset: The rows. Its position is the loader's position.
        batch_size: Rows in a batch, at least 1.
        num_workers: Worker processes, which divide the shards of this rank; 0 to read in this process.
        prefetch_factor: Chunks of rows (16, or one of each shard if these are more) that each worker prepares
            ahead; only with workers.
        pin_memory: Put batches into page-locked memory, for accelerators.

    Raises:
        DataError: A number is out of range, or there are more workers than shards.
    """

    def __init__(
        self,
        dataset: DocumentStream,
        batch_size: int,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = positive_batch_size(batch_size)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.pin_memory = pin_memory
        if not isinstance(dataset, DocumentStream):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, but StreamLoader needs a DocumentStream. Use "
                "build_loader for other datasets."
            )
        check_workers(num_workers, prefetch_factor)
        if num_workers:
            check_takers(dataset.shards, dataset.world_size, num_workers)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches that remain of the current epoch.

        Raises:
            DataError: A document cannot be read or encoded. The position stays behind the last batch
                delivered.
            RuntimeError: A newer iterator was made, or a worker process died.
        """
        return self._deliver(self.dataset.position.begin())

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self.dataset.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of this rank's documents of the epoch that were delivered whole, from 0 to 1."""
        return self.dataset.epoch_progress

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """The position behind the last batch delivered, as numbers and strings; see `DocumentStream`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position that this rank saved, or a single rank for all.

        Raises:
            DataError: The state was saved with other data or settings, by another rank, or is damaged.
        """
        self.dataset.load_state_dict(state)

    def load_resharded(
        self, states: Sequence[Mapping[str, object]], /, *, rank: int, world_size: int
    ) -> None:
        """Go to the position that another number of ranks saved together; see `DocumentStream`."""
        self.dataset.load_resharded(states, rank=rank, world_size=world_size)

    def _deliver(self, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        position = self.dataset.position
        rows = self._deliveries()
        taken = list(islice(rows, self.batch_size))
        if not taken:
            self.dataset.say_empty(position)
        over = False
        while taken:
            following = list(islice(rows, 1))
            batch = self._batch(taken)  # before the position moves: what fails here comes again
            places = [(row.shard, row.behind) for row in taken]
            over = position.advance(iteration, places, ended=not following)
            yield batch
            taken = following + list(islice(rows, self.batch_size - 1)) if following else []
        if not over:
            position.finish(iteration)

    def _deliveries(self) -> Iterator[Delivery]:
        if self.num_workers == 0:
            return deliveries_here(self.dataset, self.dataset.position)
        chunks = chunks_of_workers(self.dataset, self.num_workers, self.prefetch_factor)
        return deliveries_of(chunks)

    def _batch(self, rows: Sequence[Delivery]) -> dict[str, torch.Tensor]:
        batch = {name: torch.stack([row.example[name] for row in rows]) for name in rows[0].example}
        return {name: values.pin_memory() for name, values in batch.items()} if self.pin_memory else batch
