"""Who writes and who reads each component, agreed on by all ranks before anything is touched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch.distributed as dist
from torch.distributed import ProcessGroup

from checkpoint_core.components import SharingPattern, StateComponent, StatefulProvider
from checkpoint_core.errors import CheckpointError
from checkpoint_core.ranks.agreement import RankAgreement

_ONE_COPY = (SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value, SharingPattern.SHARDED.value)


@dataclass(frozen=True)
class Assignment:
    """The part of this rank in one component."""

    component: StateComponent
    writer: int
    """The rank that writes the file this rank reads, or makes it for the others to write into."""
    stem: str
    """Beginning of the file's name."""
    holders: tuple[int, ...] = ()
    """The ranks that hold a copy or a part of this state; empty for state of one rank."""


@dataclass(frozen=True)
class Plan:
    """What all ranks do, in one order."""

    patterns: Mapping[str, SharingPattern]
    """Pattern of every component that any rank declares, by key, in order of restoring."""
    assignments: Mapping[str, Assignment]
    """The components that this rank declares, by key."""
    validates: bool = False
    """Whether any rank asks for a comparison of replicas, in which all then take part."""

    @property
    def sharded(self) -> list[str]:
        """Keys of the components of which every rank writes a part, the same on all ranks."""
        return [key for key, pattern in self.patterns.items() if pattern is SharingPattern.SHARDED]


class _Declaration(TypedDict):
    facts: str
    patterns: dict[str, str]
    validates: bool


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
            assignments[component.key] = _assign(component, ranks, groups)
        patterns = {key: a.component.sharing_pattern.value for key, a in assignments.items()}
        validates = any(a.component.validate_replication for a in assignments.values())
        return _Declaration(facts=facts(), patterns=patterns, validates=validates)

    declared = ranks.run(phase, declare)
    validates = any(declaration["validates"] for declaration in declared)
    return Plan(_compare(phase, declared), assignments, validates)


def interchangeable(saved: str, wanted: str) -> bool:
    """Whether a component saved under one pattern can be read under another.

    Args:
        saved: Value of the pattern in the manifest.
        wanted: Value of the pattern now.

    Returns:
        True for equal patterns, and between GLOBAL, REPLICATED and SHARDED, which all store one copy.
    """
    return saved == wanted or (saved in _ONE_COPY and wanted in _ONE_COPY)


def _assign(
    component: StateComponent, ranks: RankAgreement, groups: Mapping[str, ProcessGroup]
) -> Assignment:
    match component.sharing_pattern:
        case SharingPattern.PER_RANK:
            return Assignment(component, ranks.rank, f"{component.key}.rank{ranks.rank}")
        case SharingPattern.PER_GROUP:
            name = component.process_group_name or ""
            if name not in groups:
                raise CheckpointError(
                    f"component {component.key!r}: there is no process group {name!r}; "
                    f"get_process_groups() has {sorted(groups)}"
                )
            members = tuple(sorted(dist.get_process_group_ranks(groups[name])))
            writer = min(rank for rank in members if rank in ranks.site)
            return Assignment(component, writer, f"{component.key}.group{writer}", members)
        case SharingPattern.GLOBAL:
            return Assignment(component, 0, component.key)
        case _:
            return Assignment(component, ranks.leader, component.key, tuple(range(ranks.world_size)))


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
