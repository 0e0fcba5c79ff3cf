"""Saved positions: what they hold, and whether one belongs to the data at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dataloader_dispatch.errors import DataError

VERSION = 2


class Place(NamedTuple):
    """The first token of a stream that has not been delivered.

    Attributes:
        document: Position of its document in the epoch's order; at or beyond the end when nothing is left.
        token: Number of its tokens that were delivered already.
    """

    document: int
    token: int = 0


class Cursor(NamedTuple):
    """Where the rows of an epoch stand.

    Attributes:
        epoch: Epoch number, from 0.
        turn: Number of the stream that gives the next row.
        places: Where each stream stands.
    """

    epoch: int
    turn: int
    places: tuple[Place, ...]

    @classmethod
    def start(cls, epoch: int, streams: int) -> Cursor:
        """The beginning of an epoch: stream k begins with document k of its order."""
        return cls(epoch, 0, tuple(Place(number) for number in range(streams)))


def position_state(counts: Mapping[str, object], identity: Mapping[str, object]) -> dict[str, object]:
    """A position to save: numbers and strings, as JSON has them, of the same size wherever it is.

    Args:
        counts: The position.
        identity: The data and settings it has a meaning for, by the names that messages use.
    """
    return {"version": VERSION, **counts, **identity}


def saved_counts(
    state: Mapping[str, object], names: tuple[str, ...], identity: Mapping[str, object]
) -> list[int]:
    """The counts of a saved position, after checking that it belongs to ``identity``.

    Args:
        state: What `position_state` returned, in this process or an earlier one.
        names: The counts to read.
        identity: That of the data at hand.

    Raises:
        DataError: The state is of another version, other data or other settings, or not a state at all.
    """
    if state.get("version") != VERSION:
        raise DataError(
            f"data position: version {state.get('version')!r} cannot be read; this release reads {VERSION}"
        )
    for name, ours in identity.items():
        theirs = state.get(name)
        if theirs != ours:
            raise DataError(
                f"data position: it was saved with {name}={theirs!r}, the data at hand have {name}={ours!r}; "
                "a position has a meaning only for the same data and settings. Restore them, or start the "
                "data from the beginning by not loading the position"
            )
    return [_count(state, name) for name in names]


def saved_places(state: Mapping[str, object], streams: int, documents: int) -> tuple[Place, ...]:
    """The places of a saved position.

    Raises:
        DataError: They are not places of that many streams over that many documents.
    """
    saved = state.get("places")
    if not isinstance(saved, list) or len(saved) != streams:
        raise DataError(f"data position: places={saved!r} are not those of {streams} streams; it is damaged")
    return tuple(_place(entry, number, streams, documents) for number, entry in enumerate(saved))


def below(count: int, limit: int, name: str) -> int:
    """``count`` if it is below ``limit``, else `DataError`."""
    if count >= limit:
        raise DataError(f"data position: {name}={count} is not among {limit}; the state is damaged")
    return count


def _count(state: Mapping[str, object], name: str) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"data position: {name}={value!r} is not a count; the state is damaged")
    return value


def _place(entry: object, number: int, streams: int, documents: int) -> Place:
    if isinstance(entry, list | tuple) and len(entry) == 2:
        document, token = entry
        counts = type(document) is int and type(token) is int and document >= 0 and token >= 0
        if counts and document < documents + streams and document % streams == number:
            return Place(document, token)
    raise DataError(
        f"data position: {entry!r} is no place of stream {number} among {documents} documents; it is damaged"
    )
