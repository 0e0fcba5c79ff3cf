"""Who writes and who reads each component, agreed on by all ranks before anything is touched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch.distributed as dist
from torch.distributed import ProcessGroup

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import SharingPattern, StateComponent, StatefulProvider
from checkpoint_core.errors import CheckpointError

_SHARED = (SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value)


@dataclass(frozen=True)
class Assignment:
    """The part of this rank in one component."""

    component: StateComponent
    writer: int
    """The rank that writes the file this rank reads."""
    stem: str
    """Beginning of the file's name."""


@dataclass(frozen=True)
class Plan:
    """What all ranks do, in one order."""

    patterns: Mapping[str, SharingPattern]
    """Pattern of every component that any rank declares, by key, in order of restoring."""
    assignments: Mapping[str, Assignment]
    """The components that this rank declares, by key."""


class _Declaration(TypedDict):
    facts: str
    patterns: dict[str, str]


def make_plan(phase: str, ranks: RankAgreement, provider: StatefulProvider, facts: Callable[[], str]) -> Plan:
    """Compare what the ranks declare. Collective.

    Args:
        phase: What is being done, for messages.
        ranks: The ranks.
        provider: Declares the components of this rank.
        facts: Returns text that must be equal on all ranks, such as the step.

    Returns:
        The plan.

    Raises:
        CheckpointError: On every rank, when the declarations contradict one another.
    """
    assignments: dict[str, Assignment] = {}

    def declare() -> _Declaration:
        groups = provider.get_process_groups()
        for component in provider.get_state_components():
            if component.key in assignments:
                raise CheckpointError(f"two components have the key {component.key!r}; keys must be unique")
            _check_replication(component, ranks.world_size)
            assignments[component.key] = _assign(component, ranks.rank, groups)
        patterns = {key: a.component.sharing_pattern.value for key, a in assignments.items()}
        return _Declaration(facts=facts(), patterns=patterns)

    return Plan(_compare(phase, ranks.run(phase, declare)), assignments)


def interchangeable(saved: str, wanted: str) -> bool:
    """Whether a component saved under one pattern can be read under another.

    Args:
        saved: Value of the pattern in the manifest.
        wanted: Value of the pattern now.

    Returns:
        True for equal patterns, and between GLOBAL and REPLICATED, which both store one copy.
    """
    return saved == wanted or (saved in _SHARED and wanted in _SHARED)


def _check_replication(component: StateComponent, world_size: int) -> None:
    if component.validate_replication and world_size > 1:
        raise CheckpointError(
            f"component {component.key!r}: validate_replication=True is not available with {world_size} "
            "ranks in this version; set it to False"
        )


def _assign(component: StateComponent, rank: int, groups: Mapping[str, ProcessGroup]) -> Assignment:
    match component.sharing_pattern:
        case SharingPattern.PER_RANK:
            return Assignment(component, rank, f"{component.key}.rank{rank}")
        case SharingPattern.PER_GROUP:
            name = component.process_group_name or ""
            if name not in groups:
                raise CheckpointError(
                    f"component {component.key!r}: there is no process group {name!r}; "
                    f"get_process_groups() has {sorted(groups)}"
                )
            writer = min(dist.get_process_group_ranks(groups[name]))
            return Assignment(component, writer, f"{component.key}.group{writer}")
        case _:
            return Assignment(component, 0, component.key)


def _compare(phase: str, declared: Sequence[_Declaration]) -> dict[str, SharingPattern]:
    # A pure function of what all ranks gathered, so all ranks come to the same result or the same error.
    first = declared[0]["facts"]
    for rank, declaration in enumerate(declared):
        if declaration["facts"] != first:
            raise CheckpointError(f"{phase}: rank 0 has {first}, rank {rank} has {declaration['facts']}")
    tables = [declaration["patterns"] for declaration in declared]
    patterns: dict[str, SharingPattern] = {}
    for rank, table in enumerate(tables):
        for key, value in table.items():
            pattern = patterns.setdefault(key, SharingPattern(value))
            if pattern.value != value:
                raise CheckpointError(
                    f"{phase}: component {key!r} is {pattern.name} on another rank and "
                    f"{SharingPattern(value).name} on rank {rank}"
                )
    for key, pattern in patterns.items():
        needed = range(1) if pattern is SharingPattern.GLOBAL else range(len(tables))
        absent = [rank for rank in needed if key not in tables[rank]]
        if absent:
            raise CheckpointError(
                f"{phase}: component {key!r} is {pattern.name}, but rank {absent[0]} does not declare it"
            )
    return patterns
