"""The position of a stream in this process: it moves with what is delivered, is saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.position import check_epoch, position_state
from dataloader_dispatch.stream.cursor import Cursor, Owner, Place, end_of, merge_cursors, read_cursor


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
        """A position of its own at the same place."""
        other = StreamPosition(
            self._shards,
            self._documents,
            self.owner.rank,
            self.owner.world_size,
            self._identity,
            self._accepts_encoding,
        )
        other.cursor = self.cursor.copy()
        return other

    def part_of(self, worker: int, workers: int) -> StreamPosition:
        """The position of one worker process of this rank."""
        part = self.copy()
        part.owner = self.owner._replace(worker=worker, workers=workers)
        return part

    @property
    def own_shards(self) -> range:
        """Numbers of the logical shards that are delivered here."""
        return self.owner.shards(self._shards)

    @property
    def first_row(self) -> int:
        """The lowest number that the next row of an own shard has; 0 when nothing is left of them."""
        places = [self.cursor.places[shard] for shard in self.own_shards]
        return min((place.row for place in places if place.document < self._documents), default=0)

    @property
    def progress(self) -> float:
        """Share of the own documents of this epoch that were delivered whole, from 0 to 1."""
        own = self.own_shards
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
        for shard in self.own_shards:
            self.cursor.places[shard] = end_of(shard, self._shards, self._documents)
        over = len(self.own_shards) == self._shards
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
        if not set(self.own_shards) <= set(owner.shards(self._shards)):
            raise DataError(
                f"data position: it was saved by {owner}, this is {self.owner}, and it says nothing of the "
                "shards of this one. Collect the states of all ranks that saved (all_gather_object, say) and "
                "give them to load_resharded(states, rank=..., world_size=...)"
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
                f"made for rank {self.owner.rank} of {self.owner.world_size}"
            )
        if not isinstance(states, list | tuple):
            raise DataError(
                f"data positions: expected a list of what state_dict() returned on each rank, got a "
                f"{type(states).__name__}"
            )
        parts = [self._read(state) for state in states]
        self.move(merge_cursors(parts, self.own_shards, self._shards, self._documents))

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
                "this iterator of a DocumentStream is out of date: a newer one was made, or the position was "
                "set; use the newest iterator"
            )
