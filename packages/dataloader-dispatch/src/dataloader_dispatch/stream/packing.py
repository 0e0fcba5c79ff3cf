"""The rows of one logical shard: its documents end to end, cut at every sequence length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.stream.cursor import Place
from dataloader_dispatch.stream.encoding import Piece

IGNORE_INDEX = -100


class ShardRow(NamedTuple):
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
class ShardPacker:
    """Cuts a shard into rows.

    Args:
        pieces: Token ids of a document, its separator included, by its number, from a piece on; see
            `DocumentEncoder`.
        order: Numbers of all documents in the epoch's order.
        shards: Number of shards; shard k has the positions k, k + shards, ... of the order.
        sequence_length: Tokens in a row.
        drop_last: Leave out the last row if it is not full.
    """

    pieces: Callable[[int, int, int], Iterator[Piece]]
    order: Sequence[int]
    shards: int
    sequence_length: int
    drop_last: bool

    def rows(self, shard: int, start: Place) -> Iterator[ShardRow]:
        """The rows of a shard from a place on.

        Raises:
            DataError: The place is beyond the end of its document.
        """
        parts: list[torch.Tensor] = []
        starts: list[int] = []
        filled, row, at = 0, start.row, start
        while at.document < len(self.order):
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
                        yield ShardRow(shard, row, _joined(parts), tuple(starts), behind)
                        parts, starts, filled, row, opened = [], [], 0, row + 1, False
            at = Place(at.document + self.shards)
        if parts and not self.drop_last:
            yield ShardRow(shard, row, _joined(parts), tuple(starts), Place(at.document, 0, row + 1))

    def _pieces(self, at: Place) -> Iterator[Piece]:
        """The pieces of a document, from the one in which a place is on, or from its first one."""
        number, seen = self.order[at.document], 0
        for piece in self.pieces(number, at.start, at.before):
            seen = piece.before + piece.tokens.numel()
            yield piece
        if at.token > seen:
            raise DataError(
                f"data position: token={at.token} is beyond the {seen} tokens of document {number}; was the "
                "position saved with another tokenizer or other data?"
            )


def rows_in_turn(packer: ShardPacker, shards: Sequence[int], places: Sequence[Place]) -> Iterator[ShardRow]:
    """The rows of several shards, ordered by (number of the row in its shard, number of the shard).

    This order is a function of the places alone. Whoever merges the rows of disjoint sets of shards by the
    same two numbers gets the same order, however the sets were chosen.

    Args:
        packer: Cuts the shards.
        shards: Numbers of the shards, ascending.
        places: Where each shard stands, by its number.
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
    row: ShardRow, sequence_length: int, pad_token_id: int, boundaries: bool
) -> dict[str, torch.Tensor]:
    """A row as a training example; see `DocumentStream` for its entries."""
    tokens = row.tokens
    missing = sequence_length - len(tokens)
    example = {"input_ids": _extended(tokens, missing, pad_token_id)}
    example["labels"] = _extended(tokens, missing, IGNORE_INDEX) if missing else tokens.clone()
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
