"""Documents to token rows of one length, with a position that can be saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.data import IterableDataset, get_worker_info

from dataloader_dispatch.cursor import Cursor, Place, below, position_state, saved_counts, saved_places
from dataloader_dispatch.documents import DocumentSource, data_fingerprint, token_tensor
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.shuffle import ShuffledIndex
from dataloader_dispatch.turns import take_turns

IGNORE_INDEX = -100


class PackedDocuments(IterableDataset[dict[str, torch.Tensor]]):
    """Token rows of one length, packed across documents.

    The documents of an epoch are laid end to end, each followed by ``eos_token_id``, and cut into rows of
    ``sequence_length`` tokens. A long document spans rows, a row may hold several documents. Documents
    without tokens are left out, and get no separator. Every token of every document comes exactly once an
    epoch.

    Iterating yields the rows that remain of the current epoch; a row is
    ``{"input_ids": int64 [sequence_length], "labels": int64 [sequence_length]}``. Labels are not shifted:
    they equal the input, and -100 where the last row of an epoch is padded.

    **Streams.** With ``streams=1`` the rows of a long document follow one another, and a batch of them is
    about one subject. With more, that many documents are read side by side: stream k takes the documents k,
    k + streams, k + 2 * streams, ... of the epoch's order, and the streams give their rows in turn. Still
    every document comes exactly once an epoch, and rows do not depend on batch size or number of ranks. The
    last row of each stream may be padded.

    **Position.** The object has one cursor: epoch, whose turn it is, and for each stream the position of its
    document in the epoch's order and the number of its tokens that are used up. It advances with each row
    that is delivered. Rows are cut at the same places however they are batched and however often the stream
    is interrupted. A row begins where the row before it ended, so the tail that is carried from one row into
    the next is in the state as the place where it begins, not as tokens: the state is a few numbers wherever
    it is, and restoring it reads one document of each stream again. When the last row of an epoch is
    delivered the cursor moves to the start of the next epoch; to know that, one row is prepared ahead.

    An iterator that is given up leaves the cursor behind the last row it delivered, and a new
    ``iter()`` goes on from there. Only the newest iterator is valid; asking an older one for a row, or one
    made before the position was set by hand, raises RuntimeError.

    Args:
        source: Texts or token ids; see `DocumentSource`.
        sequence_length: Tokens in a row, at least 2.
        encode: Text to token ids; required for texts, not allowed for token ids. It may return a
            sequence of ints, bytes, or a 1-D integer tensor.
        eos_token_id: Separator put behind each document that does not end with it already, so that an
            encoder that adds its own does not double it. None: no separator.
        seed: Seed of the order of documents; the order is a function of (seed, epoch).
        shuffle: False keeps the order of the source in every epoch.
        drop_last: Leave out the last row of an epoch if it is not full. Its tokens are not seen then.
        pad_token_id: Input token where the last row is padded.
        streams: Documents that are read side by side, at least 1; each is held in memory.

    Raises:
        DataError: A setting is out of range, or there is no document.
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
        streams: int = 1,
    ) -> None:
        if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 2:
            raise DataError(
                f"sequence_length={sequence_length!r} is out of range; it must be an integer of at least 2, "
                "one token to predict the other from"
            )
        for name, token in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
            if token is not None and token < 0:
                raise DataError(f"{name}={token} is out of range; token ids are not negative")
        if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
            raise DataError(f"streams={streams!r} is out of range; it must be an integer of at least 1")
        if len(source) == 0:
            raise DataError("source has no documents; give at least one")
        self.source = source
        self.sequence_length = sequence_length
        self.encode = encode
        self.eos_token_id = eos_token_id
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad_token_id = pad_token_id
        self.streams = streams
        self._order(epoch=0)  # refuses a seed that is no integer
        self._fingerprint = data_fingerprint(source)
        self._cursor = self._start(epoch=0)
        self._iterator = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next row, from 0."""
        return self._cursor.epoch

    @property
    def epoch_progress(self) -> float:
        """Share of the epoch's documents that are behind the cursor, from 0 to below 1."""
        finished = sum(
            (place.document - number) // self.streams for number, place in enumerate(self._cursor.places)
        )
        return finished / len(self.source)

    def reader(self, epoch: int = 0) -> PackedDocuments:
        """The same rows with a position of their own, at the start of an epoch."""
        other = copy.copy(self)
        other._move(other._start(epoch))
        return other

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the cursor is in that epoch already.

        Raises:
            DataError: ``epoch`` is negative.
        """
        if epoch < 0:
            raise DataError(f"epoch={epoch} is out of range; epochs count from 0")
        if epoch != self._cursor.epoch:
            self._move(self._start(epoch))

    def state_dict(self) -> dict[str, object]:
        """The position behind the last row delivered, and what it has a meaning for. Fit for JSON."""
        cursor = self._cursor
        places = [list(place) for place in cursor.places]
        return position_state(
            {"epoch": cursor.epoch, "turn": cursor.turn, "places": places}, self._identity()
        )

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position.

        Raises:
            DataError: The state was saved with other data or settings, or is damaged. The position is
                unchanged then.
        """
        epoch, turn = saved_counts(state, ("epoch", "turn"), self._identity())
        places = saved_places(state, self.streams, len(self.source))
        self._move(Cursor(epoch, below(turn, self.streams, "turn"), places))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rows that remain of the current epoch.

        Raises:
            DataError: A document cannot be read or encoded, or the epoch holds no row. The cursor stays
                behind the last row delivered.
            RuntimeError: The iterator is not the newest one.
        """
        if get_worker_info() is not None:
            raise DataError(
                "PackedDocuments was iterated in a worker process of a data loader; each worker would "
                "deliver the same rows. Set num_workers=0"
            )
        self._iterator += 1
        return self._deliver(self._iterator, self._cursor)

    def _deliver(self, iterator: int, start: Cursor) -> Iterator[dict[str, torch.Tensor]]:
        rows = self._rows(start)
        following = next(rows, None)
        if following is None:
            self._refuse_empty_epoch(start)
            self._advance(iterator, self._start(start.epoch + 1))
        while following is not None:
            tokens, behind = following
            following = next(rows, None)
            self._advance(iterator, behind if following is not None else self._start(start.epoch + 1))
            yield self._padded(tokens)

    def _rows(self, start: Cursor) -> Iterator[tuple[torch.Tensor, Cursor]]:
        """Tokens of each row from ``start`` to the end of its epoch, with the cursor behind the row."""
        order = self._order(start.epoch)
        streams = [self._stream(order, place) for place in start.places]
        places = list(start.places)
        for number, (tokens, behind) in take_turns(streams, start.turn):
            places[number] = behind
            yield tokens, Cursor(start.epoch, (number + 1) % len(streams), tuple(places))

    def _stream(self, order: Sequence[int], start: Place) -> Iterator[tuple[torch.Tensor, Place]]:
        """Tokens of each row of one stream from ``start`` on, with the place behind the row."""
        pieces: list[torch.Tensor] = []
        missing = self.sequence_length
        used = start.token
        position = start.document
        while position < len(order):
            tokens = self._tokens(order[position])
            if used > len(tokens):
                raise DataError(
                    f"data position: token={used} is beyond the {len(tokens)} tokens of document "
                    f"{order[position]}; was the position saved with another tokenizer or other data?"
                )
            while used < len(tokens):
                piece = tokens[used : used + missing]
                pieces.append(piece)
                used += len(piece)
                missing -= len(piece)
                if missing == 0:
                    yield torch.cat(pieces), Place(position, used)
                    pieces, missing = [], self.sequence_length
            used = 0
            position += self.streams
        if pieces and not self.drop_last:
            yield torch.cat(pieces), Place(position)

    def _tokens(self, index: int) -> torch.Tensor:
        """Token ids of a document with its separator; none for a document without tokens."""
        name = f"document {index}"
        try:
            document = self.source[index]
            if isinstance(document, str):
                if self.encode is None:
                    raise DataError(
                        f"{name} is text and encode is None; pass the tokenizer's encode function"
                    )
                tokens = token_tensor(self.encode(document) if document else (), name)
            else:
                if self.encode is not None:
                    raise DataError(
                        f"{name} holds token ids, to which encode does not apply; leave encode out"
                    )
                tokens = token_tensor(document, name)
        except Exception as error:
            error.add_note(f"while reading {name}{self._where(index)}")
            raise
        eos = self.eos_token_id
        if eos is None or len(tokens) == 0:
            return tokens
        if int(tokens[-1]) == eos:
            # An encoder that adds a separator makes one of nothing, too.
            return tokens if len(tokens) > 1 else tokens[:0]
        return torch.cat((tokens, tokens.new_tensor([eos])))

    def _where(self, index: int) -> str:
        where = getattr(self.source, "where", None)
        return f" ({where(index)})" if callable(where) else ""

    def _order(self, epoch: int) -> Sequence[int]:
        count = len(self.source)
        return ShuffledIndex(count, self.seed, epoch) if self.shuffle else range(count)

    def _start(self, epoch: int) -> Cursor:
        return Cursor.start(epoch, self.streams)

    def _padded(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        missing = self.sequence_length - len(tokens)
        if missing == 0:
            return {"input_ids": tokens, "labels": tokens.clone()}
        return {
            "input_ids": torch.cat((tokens, tokens.new_full((missing,), self.pad_token_id))),
            "labels": torch.cat((tokens, tokens.new_full((missing,), IGNORE_INDEX))),
        }

    def _advance(self, iterator: int, cursor: Cursor) -> None:
        if iterator != self._iterator:
            raise RuntimeError(
                "this iterator of PackedDocuments is out of date: a newer one was made, or the position was "
                "set; use the newest iterator"
            )
        self._cursor = cursor

    def _move(self, cursor: Cursor) -> None:
        self._iterator += 1
        self._cursor = cursor

    def _refuse_empty_epoch(self, start: Cursor) -> None:
        if start != self._start(start.epoch):
            return
        held = "no text"
        if self.drop_last:
            held = f"fewer than sequence_length={self.sequence_length} tokens, and drop_last leaves them out"
        raise DataError(f"no row can be made: the {len(self.source)} documents hold {held}")

    def _identity(self) -> dict[str, object]:
        return {
            "documents": len(self.source),
            "fingerprint": self._fingerprint,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "eos_token_id": self.eos_token_id,
            "streams": self.streams,
        }
