"""Saved positions: what they hold, and whether one belongs to the data at hand."""

from __future__ import annotations

from collections.abc import Mapping

from dataloader_dispatch.errors import DataError

VERSION = 4
_READABLE = (3, 4)
"""Version 3 has places of three numbers and another fingerprint of encoders; see `DocumentStream`."""


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
    if not isinstance(state, Mapping):
        raise DataError(
            f"data position: expected what state_dict() returned, got a {type(state).__name__}; the state is "
            "damaged, or a list of states is needed"
        )
    version = state.get("version")
    if not any(_same(version, readable) for readable in _READABLE):
        raise DataError(f"data position: version {version!r} cannot be read; this release reads {_READABLE}")
    for name, ours in identity.items():
        theirs = state.get(name)
        if name not in state or not _same(theirs, ours):
            raise DataError(
                f"data position: it was saved with {name}={theirs!r}, the data at hand have {name}={ours!r}; "
                "a position has a meaning only for the same data and settings. Restore them, or start the "
                "data from the beginning by not loading the position"
            )
    return [_count(state, name) for name in names]


def below(count: int, limit: int, name: str) -> int:
    """``count`` if it is below ``limit``, else `DataError`."""
    if count >= limit:
        raise DataError(f"data position: {name}={count} is not among {limit}; the state is damaged")
    return count


def check_epoch(epoch: int) -> None:
    """Refuse what is no number of an epoch, with `DataError`."""
    if not is_count(epoch):
        raise DataError(f"epoch={epoch!r} is out of range; it must be an integer, and epochs count from 0")


def is_count(value: object) -> bool:
    """Whether this is a non-negative int."""
    return type(value) is int and value >= 0


def _same(theirs: object, ours: object) -> bool:
    # The types first: a tensor has no single truth value.
    return type(theirs) is type(ours) and theirs == ours


def _count(state: Mapping[str, object], name: str) -> int:
    value = state.get(name)
    if not is_count(value):
        raise DataError(f"data position: {name}={value!r} is not a count; the state is damaged")
    return int(str(value))
