"""What all ranks must have in common, and what the others learn from the first."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import RankGroup


class Facts(NamedTuple):
    """What the root knows about its loader.

    Attributes:
        length: Number of batches; None if the loader has no length.
        batch_size: Its ``batch_size``; None if it has none.
        has_state: Whether it can be saved.
        has_resharding: Whether it takes states of another number of ranks.
        epoch: Epoch of its next batch.
    """

    length: int | None
    batch_size: int | None
    has_state: bool
    has_resharding: bool
    epoch: int


class Entry(NamedTuple):
    """What one rank says at the start.

    Attributes:
        settings: The settings that must be the same everywhere, as they are shown.
        facts: Those of the root; None on other ranks.
        problem: What is wrong with this rank's arguments; None if nothing is.
        is_type: Whether that is a type.
        host: Its host.
    """

    settings: dict[str, str]
    facts: Facts | None
    problem: str | None
    is_type: bool
    host: str


def agree(
    group: RankGroup, settings: Mapping[str, object], facts: Facts | None, problem: Exception | None
) -> tuple[Facts, dict[int, str]]:
    """Compare the arguments of all ranks. Collective.

    Returns:
        What the root knows, and the host of every rank.

    Raises:
        DataError: A setting differs, or is wrong on some rank.
        TypeError: An argument of some rank has the wrong type.
        RankFailedError: A rank is lost.
    """
    told = None if problem is None else str(problem)
    shown = {name: repr(value) for name, value in settings.items()}
    mine = Entry(shown, facts, told, isinstance(problem, TypeError), socket.gethostname())
    entries = group.gather("opening the data loader", mine)
    for index, entry in enumerate(entries):
        if entry.problem is not None:
            kind = TypeError if entry.is_type else DataError
            if problem is not None and index == group.index:
                raise problem
            raise kind(f"on {group.name(index)}: {entry.problem}")
    for name, first in entries[0].settings.items():
        for index, entry in enumerate(entries):
            if entry.settings[name] != first:
                raise DataError(
                    f"{name} must be the same on every rank; it is {first} on {group.name(0)} and "
                    f"{entry.settings[name]} on {group.name(index)}"
                )
    root = entries[0].facts
    if root is None:
        raise DataError(f"{group.name(0)} says nothing about its loader; do all ranks run the same release?")
    return root, {group.ranks[index]: entry.host for index, entry in enumerate(entries)}
