"""Documents to token rows of one length, with a position that can be saved and restored."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.data import IterableDataset, get_worker_info

from dataloader_dispatch.documents import DocumentSource, data_fingerprint
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.stream.cursor import Cursor
from dataloader_dispatch.stream.encoding import DocumentEncoder
from dataloader_dispatch.stream.order import epoch_order
from dataloader_dispatch.stream.packing import ShardPacker, ShardRow, finished_row, rows_in_turn
from dataloader_dispatch.stream.pieces import TextUnit
from dataloader_dispatch.stream.position import StreamPosition
from dataloader_dispatch.stream.settings import (
    check_encode,
    check_settings,
    check_source,
    check_takers,
    logical_shards,
)
from dataloader_dispatch.stream.skipping import RowSpan, checked_spans

logger = logging.getLogger("dataloader_dispatch.stream")


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
    ``iter()`` goes on from there. Only the newest iterator is valid; asking an older one for a row, or one
    made before the position was set by hand, raises RuntimeError.

    For batches and worker processes use `StreamLoader`. Under torchdata's ``StatefulDataLoader`` each worker
    delivers its part of the shards and keeps its part of the position; that loader needs the same number
    of workers to go on. It makes new workers for each epoch, which begin where the dataset of this process
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
        self.shards = logical_shards(shards, documents, rank, world_size)
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
            RuntimeError: The iterator is not the newest one.
        """
        position = self._position_here()
        return self._deliver(position, position.begin())

    def rows(self, position: StreamPosition) -> Iterator[ShardRow]:
        """The rows that remain at a position, in order; the position does not move.

        Raises:
            DataError: A document cannot be read or encoded.
        """
        cursor = position.cursor.copy()
        order = epoch_order(self.source, self.seed, cursor.epoch, self.shuffle)
        packer = ShardPacker(self.encoder, order, self.shards, self.sequence_length, self.drop_last)
        for row in rows_in_turn(packer, position.own_shards, cursor.places):
            number = row.row * self.shards + row.shard
            if not any(span.holds(cursor.epoch, number) for span in self.skip):
                yield row

    def example(self, row: ShardRow) -> dict[str, torch.Tensor]:
        """What iterating yields for a row."""
        return finished_row(row, self.sequence_length, self.pad_token_id, self.boundaries)

    def say_empty(self, position: StreamPosition) -> None:
        """Refuse an epoch from whose start on there is no row.

        Raises:
            DataError: This is the only rank. With several, the others may have rows, and a warning is logged.
        """
        epoch = position.cursor.epoch
        if not position.cursor.at_start(position.own_shards) or any(
            span.epoch == epoch for span in self.skip
        ):
            return
        held = "no text"
        if self.drop_last:
            held = f"fewer than sequence_length={self.sequence_length} tokens, and drop_last leaves them out"
        if position.owner.world_size * position.owner.workers == 1:
            raise DataError(f"no row can be made: the {len(self.source)} documents hold {held}")
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
