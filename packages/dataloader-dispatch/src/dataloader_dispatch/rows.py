"""Rows of a stream: their tokens and labels, and the position behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from dataloader_dispatch.document_encoder import Piece
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.read_ahead import DocumentsAhead
from dataloader_dispatch.settings import check_epoch, is_count

VERSION = 4
_READABLE = (3, 4)
"""Version 3 has places of three numbers and another fingerprint of encoders; see `DocumentStream`."""


def position_state(counts: Mapping[str, object], identity: Mapping[str, object]) -> dict[str, object]:
    """A position to save, of plain numbers and strings, and the data and settings it has a meaning for."""
    return {"version": VERSION, **counts, **identity}


def saved_counts(
    state: Mapping[str, object], names: tuple[str, ...], identity: Mapping[str, object]
) -> list[int]:
    """The named counts of a saved position, after checking that it belongs to the data at hand.

    Raises:
        DataError: The state is of another version, other data or other settings, or not a state at all.
    """
    if not isinstance(state, Mapping):
        raise DataError(
            f"data position: expected what state_dict() returned, got a {type(state).__name__}. The state "
            "is damaged, or a list of states is needed."
        )
    version = state.get("version")
    if not any(_same(version, readable) for readable in _READABLE):
        raise DataError(
            f"data position: version {version!r} cannot be read, because this release reads {_READABLE}."
        )
    for name, ours in identity.items():
        theirs = state.get(name)
        if name not in state or not _same(theirs, ours):
            raise DataError(
                f"data position: it was saved with {name}={theirs!r}, but the data at hand have "
                f"{name}={ours!r}, and a position has a meaning only for the same data and settings. "
                "Restore them, or start the data from the beginning by not loading the position."
            )
    return [_count(state, name) for name in names]


def _same(theirs: object, ours: object) -> bool:
    # The types first: a tensor has no single truth value.
    return type(theirs) is type(ours) and theirs == ours


def _count(state: Mapping[str, object], name: str) -> int:
    value = state.get(name)
    if not is_count(value):
        raise DataError(f"data position: {name}={value!r} is not a count, so the state is damaged.")
    return int(str(value))


IGNORED_LABEL = -100
"""The label that losses leave out: ``ignore_index`` of `torch.nn.functional.cross_entropy`."""
_NAN_MARKS = {
    torch.float64: (torch.int64, 0x7FF8_0000_0000_A5A5),
    torch.float32: (torch.int32, 0x7FC0_A5A5),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7EA5),
}
"""For each floating type the bits of a label that does not count: a quiet "not a number" whose payload (IEEE
754, section 6.2) no division by zero and no `float("nan")` has. Copies to devices and ranks keep the bits."""


def ignored_like(labels: torch.Tensor) -> torch.Tensor:
    """Labels that do not count, of the type and shape of others.

    Args:
        labels: Of a signed integer or a floating type.

    Returns:
        A new tensor: -100, or where labels are floating "not a number", which `is_ignored` tells from others.

    Raises:
        DataError: If labels of this type can hold neither.
    """
    if labels.dtype in _NAN_MARKS:
        bits, mark = _NAN_MARKS[labels.dtype]
        filled = torch.empty_like(labels)
        filled.view(bits).fill_(mark)
        return filled
    if labels.is_floating_point():
        return torch.full_like(labels, torch.nan)
    if labels.is_complex() or not labels.dtype.is_signed:
        raise cannot_mask(f"labels of type {labels.dtype}, which cannot hold {IGNORED_LABEL}")
    return torch.full_like(labels, IGNORED_LABEL)


def is_ignored(labels: torch.Tensor) -> torch.Tensor:
    """Which labels do not count: those of -100, and of floating ones those that `ignored_like` gave.

    Any other "not a number" is data that went wrong, and shows in a loss as it does in torch.

    Args:
        labels: Of any type and shape.

    Returns:
        bool, in the shape of the labels.
    """
    if labels.dtype in _NAN_MARKS:
        bits, mark = _NAN_MARKS[labels.dtype]
        return labels.view(bits) == mark
    if labels.is_floating_point():
        return labels.isnan()
    # Held against -100, an unsigned label of 156 would pass for it.
    return labels == IGNORED_LABEL if labels.dtype.is_signed else torch.zeros_like(labels, dtype=torch.bool)


def cannot_mask(what: str) -> DataError:
    """The error for what cannot be made a part of a batch that counts for nothing."""
    return DataError(
        f"uneven='pad' replaces missing batches by masked dummies, and cannot mask {what}. Give mappings "
        f"with 'labels' of a signed integer type (masked with {IGNORED_LABEL}), as of labels.long(), or of "
        "a floating type (masked with nan), or a make_dummy function of your own, or choose uneven='stop'."
    )


class Place(NamedTuple):
    """The first token of a shard that has not been delivered.

    Attributes:
        document: Position of its document in the epoch's order; at or beyond the end when nothing is left.
        token: Number of its tokens that were delivered already.
        row: Number of rows that the shard has given in this epoch.
        start: First character of the piece of the document's text that holds the last delivered token; 0 if
            the document is encoded at once.
        before: Number of its tokens before that piece.
    """

    document: int
    token: int = 0
    row: int = 0
    start: int = 0
    before: int = 0


class Owner(NamedTuple):
    """Who delivers which of the logical shards.

    Rank r of W has the shards r, r + W, r + 2 W, ...; worker v of V has every V-th of those from the v-th on.

    Attributes:
        rank: Rank among those that share the documents.
        world_size: Number of these ranks.
        worker: Number of a worker process of the rank.
        workers: Number of worker processes; 1 without any.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def streams(self, count: int) -> range:
        """Numbers of the shards it delivers, of ``count`` in all."""
        first = self.rank + self.world_size * self.worker
        return range(first, count, self.world_size * self.workers)

    def __str__(self) -> str:
        worker = f", worker {self.worker} of {self.workers}" if self.workers > 1 else ""
        return f"rank {self.rank} of {self.world_size}{worker}"


@dataclass(slots=True)
class Cursor:
    """A position in an epoch.

    Attributes:
        epoch: Epoch number, from 0.
        places: Where each logical shard stands; known only for the shards of this position's owner.
    """

    epoch: int
    places: list[Place]

    @classmethod
    def start(cls, epoch: int, shards: int) -> Self:
        """The beginning of an epoch: shard k begins with document k of its order."""
        return cls(epoch, [Place(number) for number in range(shards)])

    def copy(self) -> Cursor:
        """The same position, to be moved independently."""
        return Cursor(self.epoch, list(self.places))

    def at_start(self, shards: Iterable[int]) -> bool:
        """Whether none of these shards has given anything."""
        return all(self.places[shard] == Place(shard) for shard in shards)

    def ended(self, shards: Iterable[int], documents: int) -> bool:
        """Whether nothing is left of these shards."""
        return all(self.places[shard].document >= documents for shard in shards)


def end_of(shard: int, shards: int, documents: int) -> Place:
    """The place of a shard of which nothing is left."""
    return Place(documents + (shard - documents) % shards)


def read_cursor(
    state: Mapping[str, object], shards: int, documents: int, identity: Mapping[str, object]
) -> tuple[Cursor, Owner]:
    """The position in a saved state, and whose it was.

    Raises:
        DataError: The state belongs to other data or settings, or is damaged.
    """
    epoch, *owner = saved_counts(state, ("epoch", *Owner._fields), identity)
    saved = state.get("places")
    if not isinstance(saved, list) or len(saved) != shards:
        raise DataError(
            f"data position: places={saved!r} are not those of {shards} shards, so the state is damaged."
        )
    rank, world_size, worker, workers = owner
    if not (rank < world_size and worker < workers):
        raise DataError(
            f"data position: rank={rank} of world_size={world_size}, worker={worker} of workers={workers} "
            "cannot be, so the state is damaged."
        )
    places = [_place(entry, number, shards, documents) for number, entry in enumerate(saved)]
    return Cursor(epoch, places), Owner(*owner)


def merge_cursors(
    parts: Sequence[tuple[Cursor, Owner]], needed: Sequence[int], shards: int, documents: int
) -> Cursor:
    """One position out of those that several owners of shards saved at the same time.

    An owner that is at the start of the epoch after the others' has ended theirs.

    Args:
        parts: The positions, and whose they are; one that comes again counts once.
        needed: Shards that the result must know.
        shards: Number of all shards.
        documents: Documents in an epoch.

    Raises:
        DataError: A needed shard has no owner, one has two, or the owners were epochs apart.
    """
    # Ranks that divide one model among them and read by themselves have all saved the same.
    parts = [part for number, part in enumerate(parts) if part not in parts[:number]]
    owned = [owner.streams(shards) for _, owner in parts]
    held = sorted(shard for numbers in owned for shard in numbers)
    if len(set(held)) < len(held) or not set(needed) <= set(held):
        whose = "; ".join(str(owner) for _, owner in parts)
        raise DataError(
            f"data positions: those given ({whose}) do not cover each of the {shards} shards once. Give "
            "those of all ranks of the run that saved them, and of no other."
        )
    epoch = min(cursor.epoch for cursor, _ in parts)
    merged = Cursor.start(epoch, shards)
    for (cursor, owner), numbers in zip(parts, owned, strict=True):
        ahead = cursor.epoch > epoch
        if ahead and not (cursor.epoch == epoch + 1 and cursor.at_start(numbers)):
            raise DataError(
                f"data positions: {owner} was in epoch {cursor.epoch} while others were in epoch {epoch}, "
                "but ranks that advance together never are. Use SynchronizedDataLoader, and save on all "
                "ranks at once."
            )
        for shard in numbers:
            merged.places[shard] = end_of(shard, shards, documents) if ahead else cursor.places[shard]
    over = len(held) == shards and merged.ended(held, documents)
    return Cursor.start(epoch + 1, shards) if over else merged


def _place(entry: object, number: int, shards: int, documents: int) -> Place:
    # Releases up to 0.1 cut no documents, and saved three numbers.
    if isinstance(entry, list | tuple) and len(entry) in (3, 5) and all(is_count(value) for value in entry):
        place = Place(*entry)
        inside = place.document < documents + shards and place.document % shards == number
        if inside and place.before <= place.token and bool(place.start) == bool(place.before):
            return place
    raise DataError(
        f"data position: {entry!r} is not a position in shard {number} among {documents} documents, so the "
        "state is damaged."
    )


class StreamRow(NamedTuple):
    """One row of a shard.

    Attributes:
        shard: Number of the shard.
        row: Number of the row among those of the shard in this epoch.
        tokens: int64 [n], with n below the sequence length only in the shard's last row.
        starts: Where in the row each of its documents begins; the first entry is 0.
        behind: Where the shard stands behind the row.
    """

    shard: int
    row: int
    tokens: torch.Tensor
    starts: tuple[int, ...]
    behind: Place


@dataclass(frozen=True, slots=True)
class StreamPacker:
    """Cuts a shard into rows.

    Args:
        pieces: Token ids of a document, its separator included, by its number, from a piece on; see
            `DocumentEncoder`.
        order: Numbers of all documents in the epoch's order; shard k of n has every n-th from the k-th on.
        shards: Number of shards.
        sequence_length: Tokens in a row.
        drop_last: Leave out the last row if it is not full.
        ahead: Told where each shard is.
    """

    pieces: Callable[[int, int, int], Iterator[Piece]]
    order: Sequence[int]
    shards: int
    sequence_length: int
    drop_last: bool
    ahead: DocumentsAhead | None = None

    def rows(self, shard: int, start: Place) -> Iterator[StreamRow]:
        """The rows of a shard from a place on.

        Raises:
            DataError: The place is beyond the end of its document.
        """
        parts: list[torch.Tensor] = []
        starts: list[int] = []
        filled, row, at = 0, start.row, start
        while at.document < len(self.order):
            if self.ahead is not None:
                self.ahead.tell(shard, at.document)
            opened = False  # whether the row has tokens of this document
            for piece in self._pieces(at):
                length, used = piece.tokens.numel(), max(at.token - piece.before, 0)
                while used < length:
                    taken = min(length - used, self.sequence_length - filled)
                    if not opened:
                        starts.append(filled)
                        opened = True
                    parts.append(piece.tokens[used : used + taken])
                    used += taken
                    filled += taken
                    if filled == self.sequence_length:
                        behind = Place(at.document, piece.before + used, row + 1, piece.start, piece.before)
                        yield StreamRow(shard, row, _joined(parts), tuple(starts), behind)
                        parts, starts, filled, row, opened = [], [], 0, row + 1, False
            at = Place(at.document + self.shards)
        if parts and not self.drop_last:
            yield StreamRow(shard, row, _joined(parts), tuple(starts), Place(at.document, 0, row + 1))

    def _pieces(self, at: Place) -> Iterator[Piece]:
        """The pieces of a document, from the one in which a place is on, or from its first one."""
        number, seen = self.order[at.document], 0
        for piece in self.pieces(number, at.start, at.before):
            seen = piece.before + piece.tokens.numel()
            yield piece
        if at.token > seen:
            raise DataError(
                f"data position: token={at.token} is beyond the {seen} tokens of document {number}. Was the "
                "position saved with another tokenizer or other data?"
            )


def rows_in_turn(packer: StreamPacker, shards: Sequence[int], places: Sequence[Place]) -> Iterator[StreamRow]:
    """The rows of several shards, ordered by (number of the row in its shard, number of the shard).

    This order is a function of the places alone. Whoever merges the rows of disjoint sets of shards (with
    the places where they stand) by the same two numbers gets the same order, however the sets
    were chosen.
    """
    left = [shard for shard in shards if places[shard].document < len(packer.order)]
    waiting = {shard: packer.rows(shard, places[shard]) for shard in left}
    rows = {shard: places[shard].row for shard in left}
    number = min(rows.values(), default=0)
    while waiting:
        for shard in [shard for shard in waiting if rows[shard] == number]:
            following = next(waiting[shard], None)
            if following is None:
                del waiting[shard]
            else:
                rows[shard] += 1
                yield following
        number += 1


def finished_row(
    row: StreamRow, sequence_length: int, pad_token_id: int, boundaries: bool
) -> dict[str, torch.Tensor]:
    """A row as a training example; see `DocumentStream` for its entries."""
    tokens = row.tokens
    missing = sequence_length - len(tokens)
    example = {"input_ids": _extended(tokens, missing, pad_token_id)}
    example["labels"] = _extended(tokens, missing, IGNORED_LABEL) if missing else tokens.clone()
    if boundaries:
        # The separator belongs to the document before it, as it was appended to that one.
        ends = (*row.starts[1:], len(tokens))
        lengths = [end - start for start, end in zip(row.starts, ends, strict=True)]
        positions = torch.cat([torch.arange(length) for length in lengths])
        documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        example["position_ids"] = _extended(positions, missing, 0)
        example["document_ids"] = _extended(documents, missing, -1)
    return example


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()


def _extended(values: torch.Tensor, missing: int, filler: int) -> torch.Tensor:
    return torch.cat((values, values.new_full((missing,), filler))) if missing else values


class StreamPosition:
    """Where the stream of one rank stands.

    Args:
        shards: Number of logical shards.
        documents: Documents in an epoch.
        rank: Rank among those that share the documents.
        world_size: Number of these ranks.
        identity: The data and settings that the position has a meaning for.
        accepts_encoding: Whether another "encoding" than that in the identity has the same meaning.
    """

    def __init__(
        self,
        shards: int,
        documents: int,
        rank: int,
        world_size: int,
        identity: Mapping[str, object],
        accepts_encoding: Callable[[object], bool],
    ) -> None:
        self._shards = shards
        self._documents = documents
        self._identity = identity
        self._accepts_encoding = accepts_encoding
        self.owner = Owner(rank, world_size)
        self.cursor = Cursor.start(0, shards)
        self._iteration = 0

    def copy(self) -> StreamPosition:
        """A position of its own at the same place, for this rank without its workers."""
        other = copy.copy(self)
        other.owner = Owner(self.owner.rank, self.owner.world_size)
        other.cursor, other._iteration = self.cursor.copy(), 0
        return other

    def part_of(self, worker: int, workers: int) -> StreamPosition:
        """The position of one worker process of this rank."""
        part = self.copy()
        part.owner = self.owner._replace(worker=worker, workers=workers)
        return part

    @property
    def own_streams(self) -> range:
        """Numbers of the logical shards that are delivered here."""
        return self.owner.streams(self._shards)

    @property
    def first_row(self) -> int:
        """The lowest number that the next row of an own shard has; 0 when nothing is left of them."""
        places = [self.cursor.places[shard] for shard in self.own_streams]
        return min((place.row for place in places if place.document < self._documents), default=0)

    @property
    def progress(self) -> float:
        """Share of the own documents of this epoch that were delivered whole, from 0 to 1."""
        own = self.own_streams
        total = sum(len(range(shard, self._documents, self._shards)) for shard in own)
        done = sum((self.cursor.places[shard].document - shard) // self._shards for shard in own)
        return min(done / total, 1.0) if total else 0.0

    def begin(self) -> int:
        """Number of a new iteration, which makes those before it out of date."""
        self._iteration += 1
        return self._iteration

    def advance(self, iteration: int, delivered: Iterable[tuple[int, Place]], *, ended: bool) -> bool:
        """Move behind rows that are being delivered.

        Args:
            iteration: What `begin` returned.
            delivered: Shards, and where each stands behind its row.
            ended: Whether nothing of the own shards is left behind them.

        Returns:
            Whether this was the epoch's end, so that the position is at the start of the next one. Where
            others have shards too it is at the end of the epoch, until `finish` is called.

        Raises:
            RuntimeError: A newer iteration was begun, or the position was set.
        """
        self._check(iteration)
        for shard, place in delivered:
            self.cursor.places[shard] = place
        if not ended:
            return False
        # What drop_last, skip or documents without tokens leave behind the last row is nothing.
        for shard in self.own_streams:
            self.cursor.places[shard] = end_of(shard, self._shards, self._documents)
        over = len(self.own_streams) == self._shards
        if over:
            self._next_epoch()
        return over

    def finish(self, iteration: int) -> None:
        """Go to the next epoch, as the caller is told that this one is over.

        Args:
            iteration: What `begin` returned.

        Raises:
            RuntimeError: A newer iteration was begun, or the position was set.
        """
        self._check(iteration)
        self._next_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, or do nothing when the position is in that epoch already."""
        check_epoch(epoch)
        if epoch != self.cursor.epoch:
            self.move(Cursor.start(epoch, self._shards))

    def move(self, cursor: Cursor) -> None:
        """Go elsewhere; iterations that are under way become out of date."""
        self._iteration += 1
        self.cursor = cursor

    def state_dict(self) -> dict[str, object]:
        """The position, and what it has a meaning for, as JSON has it."""
        places = [list(place) for place in self.cursor.places]
        counts = {"epoch": self.cursor.epoch, **self.owner._asdict(), "places": places}
        return position_state(counts, self._identity)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position of this rank, or of all ranks.

        Raises:
            DataError: The state belongs to other data or settings, or to ranks other than this one.
        """
        cursor, owner = self._read(state)
        if not set(self.own_streams) <= set(owner.streams(self._shards)):
            raise DataError(
                f"data position: it was saved by {owner}, but this is {self.owner}, and it says nothing of "
                "the shards of this one. Collect the states of all ranks that saved (with "
                "all_gather_object, for example) and give them to load_resharded(states, rank=..., "
                "world_size=...)."
            )
        self.move(cursor)

    def load_resharded(self, states: Sequence[Mapping[str, object]], rank: int, world_size: int) -> None:
        """Go to the position that other ranks saved together.

        Raises:
            DataError: The states do not fit together, or ``rank`` and ``world_size`` are not those of the
                stream.
        """
        if (rank, world_size) != (self.owner.rank, self.owner.world_size):
            raise DataError(
                f"load_resharded(rank={rank}, world_size={world_size}) contradicts the stream, which was "
                f"made for rank {self.owner.rank} of {self.owner.world_size}."
            )
        if not isinstance(states, list | tuple):
            raise DataError(
                "data positions: expected a list of what state_dict() returned on each rank, got a "
                f"{type(states).__name__}."
            )
        parts = [self._read(state) for state in states]
        self.move(merge_cursors(parts, self.own_streams, self._shards, self._documents))

    def _read(self, state: Mapping[str, object]) -> tuple[Cursor, Owner]:
        identity = self._identity
        if isinstance(state, Mapping) and "encoding" in state and self._accepts_encoding(state["encoding"]):
            identity = {**identity, "encoding": state["encoding"]}
        return read_cursor(state, self._shards, self._documents, identity)

    def _next_epoch(self) -> None:
        self.cursor = Cursor.start(self.cursor.epoch + 1, self._shards)

    def _check(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "this iterator of a DocumentStream is out of date: a newer one was made, or the position "
                "was set. Use the newest iterator."
            )
