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
        settings: The values of the settings that must be the same everywhere.
        facts: Those of the root; None on other ranks.
        problem: What is wrong with this rank's arguments; None if nothing is.
        host: Its host.
    """

    settings: Mapping[str, object]
    facts: Facts | None
    problem: Exception | None
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
    mine = Entry(settings, facts, problem, socket.gethostname())
    entries = group.gather("opening the data loader", mine)
    for index, entry in enumerate(entries):
        if entry.problem is not None:
            raise entry.problem if index == group.index else _elsewhere(group.name(index), entry.problem)
    for name, first in entries[0].settings.items():
        for index, entry in enumerate(entries):
            if entry.settings[name] != first:
                raise DataError(
                    f"{name} must be the same on every rank; it is {first!r} on {group.name(0)} and "
                    f"{entry.settings[name]!r} on {group.name(index)}"
                )
    root = entries[0].facts
    if root is None:
        raise DataError(f"{group.name(0)} says nothing about its loader; do all ranks run the same release?")
    return root, {group.ranks[index]: entry.host for index, entry in enumerate(entries)}


def _elsewhere(name: str, problem: Exception) -> Exception:
    return type(problem)(f"on {name}: {problem}")
