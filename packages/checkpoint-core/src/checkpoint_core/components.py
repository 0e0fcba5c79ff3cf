"""What persists: state components, declared by a provider, and which rank writes and reads each of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypedDict, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.errors import CheckpointError

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_RESERVED = {"manifest", "config", "eval_metrics"}
_LEVELS = ("none", "structure", "tensor", "exact")


class SharingPattern(Enum):
    """How the ranks of a job share one component, which decides who writes and who reads."""

    GLOBAL = "global"
    """One authoritative copy on rank 0. Rank 0 writes and reads, and hands the state to the other ranks."""
    PER_RANK = "per_rank"
    """Different on every rank. Every rank writes and reads a file of its own. The world size must match,
    unless the object is :class:`Reshardable`. Such a component may also be saved as GLOBAL or REPLICATED and
    loaded as PER_RANK, and the other way round: one copy is the state of a job of one rank."""
    REPLICATED = "replicated"
    """Identical on all ranks. Rank 0 writes, every rank reads the one copy."""
    PER_GROUP = "per_group"
    """Identical inside a named process group. The lowest rank of each group writes, its members read."""
    SHARDED = "sharded"
    """Parts of one state, put together by name: slices of DTensors, or the tensors of pipeline stages. Every
    rank writes and reads its own bytes. The files are those of a REPLICATED component, whatever the number of
    ranks, so the one can be loaded as the other."""


_REPLICATED = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken out and put back."""

    def state_dict(self) -> dict[str, object]:
        """The state: nested dict, list, tuple, int, float, str, bool, None, bytes and tensors."""
        ...

    def load_state_dict(self, state: dict[str, object], /) -> object:
        """Put back what :meth:`state_dict` returned. Tensors arrive on the CPU."""
        ...


@runtime_checkable
class Reshardable(Protocol):
    """A stateful object whose PER_RANK states can be distributed anew over another number of ranks."""

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> object:
        """Take up the states that other ranks saved.

        A GLOBAL or REPLICATED component counts as a job of one rank, on either side.

        Args:
            states: What ``state_dict`` returned on each rank of the job that saved, by rank.
            rank: This rank; 0 where all ranks take up one state.
            world_size: Number of ranks now; 1 where all ranks take up one state.
        """
        ...


def is_reshardable(stateful: object) -> TypeGuard[Reshardable]:
    """Whether an object can take up states that another number of ranks saved.

    Some objects lack the method only at times: a property that raises AttributeError. ``isinstance`` does not
    see that from Python 3.12 on.
    """
    return callable(getattr(stateful, "load_resharded", None))


@dataclass(frozen=True, kw_only=True)
class StateComponent:
    """One thing to save.

    ``state_dict()`` is called on every rank that declares the component, except for GLOBAL, where only rank 0
    is asked.

    Raises:
        CheckpointError: A key that cannot be a file name, or fields that contradict one another.
        TypeError: ``stateful`` has no ``state_dict`` and ``load_state_dict``, or must be wrapped first.
    """

    key: str
    """Unique name and file stem: letters, digits, ``_`` and ``-``, beginning with a letter."""
    stateful: Stateful
    """Source and sink of the state."""
    sharing_pattern: SharingPattern
    """How the ranks share it."""
    required: bool = False
    """True: loading fails when the component's file is missing. False: a warning, and fresh state stays."""
    validate_replication: bool = False
    """Compare the copies of a REPLICATED or PER_GROUP component before saving."""
    validation_level: str = "tensor"
    """How thoroughly to compare: ``none``; ``structure`` (names, dtypes, shapes, scalars); ``tensor``, also a
    checksum of every tensor; or ``exact``, which also finds the first element that differs."""
    process_group_name: str | None = None
    """For PER_GROUP: a key of the provider's ``get_process_groups()``."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not _KEY.fullmatch(self.key) or self.key in _RESERVED:
            raise CheckpointError(
                f"StateComponent key {self.key!r} cannot be a file stem. Use letters, digits, '_' and '-', "
                f"beginning with a letter, and none of {sorted(_RESERVED)}."
            )
        if isinstance(self.stateful, (torch.nn.Module, torch.optim.Optimizer)):
            wrapper = "ModelState(model)"
            if isinstance(self.stateful, torch.optim.Optimizer):
                wrapper = "OptimizerState(optimizer, model)"
            kind = type(self.stateful).__name__
            raise TypeError(
                f"component {self.key!r} is a {kind}. Wrap it as {wrapper}, so that names are stable."
            )
        if not isinstance(self.stateful, Stateful):
            kind = type(self.stateful).__name__
            raise TypeError(f"component {self.key!r}: a {kind} has no state_dict() and load_state_dict().")
        if self.validation_level not in _LEVELS:
            raise CheckpointError(
                f"component {self.key!r}: validation_level {self.validation_level!r} is not one of {_LEVELS}."
            )
        if self.validate_replication and self.sharing_pattern not in _REPLICATED:
            raise CheckpointError(
                f"component {self.key!r}: validate_replication=True compares copies, but a component that "
                f"is {self.sharing_pattern.name} has none. Set it to False, or declare REPLICATED or "
                "PER_GROUP."
            )
        if (self.sharing_pattern is SharingPattern.PER_GROUP) != (self.process_group_name is not None):
            raise CheckpointError(
                f"component {self.key!r}: process_group_name goes with SharingPattern.PER_GROUP, and only "
                f"with it, but it is {self.process_group_name!r} with {self.sharing_pattern.name}."
            )


class StatefulProvider(Protocol):
    """The owner of the state, usually a trainer."""

    def get_state_components(self) -> Sequence[StateComponent]:
        """The components of this rank, in the order in which they are restored."""
        ...

    def get_process_groups(self) -> Mapping[str, ProcessGroup]:
        """Named process groups for PER_GROUP components; empty when there are none."""
        ...


@dataclass(frozen=True)
class StaticStatefulProvider:
    """A provider for loops without a trainer: a fixed list of components."""

    components: Sequence[StateComponent]
    """The components of this rank."""
    process_groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """Named process groups."""

    def get_state_components(self) -> Sequence[StateComponent]:
        """The components given."""
        return self.components

    def get_process_groups(self) -> Mapping[str, ProcessGroup]:
        """The groups given."""
        return self.process_groups


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
                raise CheckpointError(
                    f"two components have the key {component.key!r}. Give each a key of its own."
                )
            assignments[component.key] = _assign(component, ranks, groups)
        patterns = {key: a.component.sharing_pattern.value for key, a in assignments.items()}
        validates = any(a.component.validate_replication for a in assignments.values())
        return _Declaration(facts=facts(), patterns=patterns, validates=validates)

    declared = ranks.run(phase, declare)
    validates = any(declaration["validates"] for declaration in declared)
    return Plan(_compare(phase, declared), assignments, validates)


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
                    f"component {component.key!r}: there is no process group {name!r}. get_process_groups() "
                    f"has {sorted(groups)}."
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
            raise CheckpointError(f"{phase}: rank 0 has {first}, but rank {rank} has {declaration['facts']}.")
    tables = [declaration["patterns"] for declaration in declared]
    patterns: dict[str, SharingPattern] = {}
    for rank, table in enumerate(tables):
        for key, value in table.items():
            pattern = patterns.setdefault(key, SharingPattern(value))
            if pattern.value != value:
                raise CheckpointError(
                    f"{phase}: component {key!r} is {pattern.name} on another rank and "
                    f"{SharingPattern(value).name} on rank {rank}."
                )
    for key, pattern in patterns.items():
        needed = range(1) if pattern is SharingPattern.GLOBAL else range(len(tables))
        absent = [rank for rank in needed if key not in tables[rank]]
        if absent:
            raise CheckpointError(
                f"{phase}: component {key!r} is {pattern.name}, but rank {absent[0]} does not declare it."
            )
    return patterns
