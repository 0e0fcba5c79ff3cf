"""What persists: state components, how ranks share them, and the objects of a loop wrapped as such."""

import logging
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypedDict, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.encoding import is_sharded
from checkpoint_core.errors import CheckpointError
from checkpoint_core.model_state import ModelState, OptimizerState

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
    writers: Mapping[str, set[int]] = field(default_factory=dict)
    """Of each PER_GROUP component the ranks that write for a group, by key."""

    def check_groups(self, key: str, saved: set[int], site: range) -> None:
        """Refuse groups that would leave out what another group has saved.

        Args:
            key: A component.
            saved: The ranks that wrote it.
            site: The ranks whose files are seen here.

        Raises:
            CheckpointError: It is PER_GROUP, and some of them write for no group now.
        """
        now = self.writers.get(key)
        if now is not None and (lost := sorted(saved - now)):
            raise CheckpointError(
                f"component {key!r} was saved PER_GROUP by groups of which ranks {sorted(saved)} are the "
                f"first, but now those are {sorted(now.intersection(site))}, and the state of the group of "
                f"rank {lost[0]} would be lost. Form the groups as they were, or delete the files of this "
                "component from the checkpoint to begin with fresh state for it."
            )

    @property
    def sharded(self) -> list[str]:
        """Keys of the components of which every rank writes a part, the same on all ranks."""
        return [key for key, pattern in self.patterns.items() if pattern is SharingPattern.SHARDED]


class _Declaration(TypedDict):
    facts: str
    patterns: dict[str, str]
    validates: bool
    writers: dict[str, int]
    """Of the PER_GROUP components."""


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
        writers = {key: a.writer for key, a in assignments.items() if a.component.process_group_name}
        return _Declaration(facts=facts(), patterns=patterns, validates=validates, writers=writers)

    declared = ranks.run(phase, declare)
    validates = any(declaration["validates"] for declaration in declared)
    writers: dict[str, set[int]] = {}
    for key, writer in {pair for declaration in declared for pair in declaration["writers"].items()}:
        writers.setdefault(key, set()).add(writer)
    return Plan(_compare(phase, declared), assignments, validates, writers)


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
            return Assignment(component, ranks.site.start, component.key, tuple(range(ranks.world_size)))


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


_SAME_EVERYWHERE = (LRScheduler, torch.amp.GradScaler)
Parts = nn.Module | Sequence[nn.Module]


def wrap_state(state: Mapping[str, object], world_size: int) -> list[StateComponent]:
    """One component for each object, by its type.

    A model is REPLICATED, or SHARDED if it has DTensors or is a list of parts of a model; an optimizer is as
    the model that has its parameters; a learning rate scheduler and a gradient scaler are REPLICATED; a
    loader, which is iterable, and generators are PER_RANK. A `StateComponent` stays as it is. Copies on
    several ranks must agree in names, dtypes and shapes, so that no part of a model is taken for all of it.

    Args:
        state: Models, optimizers, schedulers, loaders and the like, by component key.
        world_size: Number of ranks.

    Raises:
        CheckpointError: A key names another component, an optimizer has parameters of no model that is
            given, or an object does not tell how ranks share it.
        TypeError: An object has no state that can be saved.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state is a {type(state).__name__}. Give a dictionary such as "
            f'{{"model": model, "optimizer": optimizer}}, whose keys name the files.'
        )
    models = {key: value for key, value in state.items() if _is_model(value)}
    components = []
    for key, value in state.items():
        if isinstance(value, StateComponent):
            if value.key != key:
                raise CheckpointError(
                    f"the StateComponent under {key!r} has the key {value.key!r}. Give it under its own key."
                )
            components.append(value)
            continue
        stateful, pattern = _wrap(key, value, models, world_size)
        components.append(
            StateComponent(
                key=key,
                stateful=stateful,
                sharing_pattern=pattern,
                validate_replication=pattern is SharingPattern.REPLICATED and world_size > 1,
                validation_level="structure",
            )
        )
    return components


def _wrap(
    key: str, value: object, models: Mapping[str, Parts], world_size: int
) -> tuple[Stateful, SharingPattern]:
    if key in models:
        return ModelState(models[key]), _pattern(models[key])
    if isinstance(value, Optimizer):
        model = _owner(key, value, models)
        return OptimizerState(value, model), _pattern(model)
    stateful = _stateful(key, value)
    # Accelerate's scheduler is not an LRScheduler, but contains one.
    if isinstance(value, _SAME_EVERYWHERE) or isinstance(getattr(value, "scheduler", None), LRScheduler):
        return stateful, SharingPattern.REPLICATED
    if isinstance(value, (RNGState, Iterable)):
        return stateful, SharingPattern.PER_RANK
    if world_size > 1:
        raise CheckpointError(
            f"component {key!r}: a {type(value).__name__} does not tell how {world_size} ranks share it. "
            f"Give StateComponent(key={key!r}, stateful=..., sharing_pattern=SharingPattern.REPLICATED) if "
            "it is the same on all ranks, SHARDED if each has a part of it, or PER_RANK if each has its "
            "own."
        )
    return stateful, SharingPattern.REPLICATED


def _is_model(value: object) -> TypeGuard[Parts]:
    if isinstance(value, nn.Module):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, nn.Module) for m in value)


def _parts(model: Parts) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def _pattern(model: Parts) -> SharingPattern:
    if isinstance(model, nn.Module) and not any(is_sharded(p) for p in model.parameters()):
        return SharingPattern.REPLICATED
    return SharingPattern.SHARDED


def _owner(key: str, optimizer: Optimizer, models: Mapping[str, Parts]) -> Parts:
    """The model with all parameters of an optimizer."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models.values():
        if wanted <= {id(parameter) for part in _parts(model) for parameter in part.parameters()}:
            return model
    given = f"none of the models given ({', '.join(models)}) has" if models else "no model is given that has"
    raise CheckpointError(
        f"component {key!r}: {given} all parameters of the {type(optimizer).__name__}, whose state is "
        f"stored under their names. Give the model too, or {key!r}: OptimizerState(optimizer, model)."
    )


def _stateful(key: str, value: object) -> Stateful:
    """An object, if its state can be saved."""
    kind = type(value).__name__
    # The loaders that Accelerate prepares have the methods in any case. Those with use_stateful_dataloader
    # restore how many batches were taken, but not the order of a shuffle: other samples would follow.
    is_prepared = type(value).__module__.startswith("accelerate.")
    if isinstance(value, Stateful) and not (isinstance(value, Iterable) and is_prepared):
        return value
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, list, tuple)):
        reason = ", since Accelerate does not restore a shuffled order" if is_prepared else ""
        raise TypeError(
            f"component {key!r}: the position of a {kind} cannot be saved{reason}. Use torchdata's "
            f"StatefulDataLoader, or build_loader of dataloader-dispatch{', as it is' * is_prepared}."
        )
    raise TypeError(
        f"component {key!r}: a {kind} has no state_dict() and load_state_dict(). Give an object that has "
        "both, or a StateComponent."
    )


_logger = logging.getLogger(__name__)


class RNGState:
    """Python's, numpy's and PyTorch's global random number generators as a state component.

    Saved are Python's ``random``, numpy's global generator when numpy is in use, PyTorch's CPU generator, and
    the generator of the current accelerator device (one device a rank). Declare it PER_RANK.
    """

    def state_dict(self) -> dict[str, object]:
        """The current states.

        Returns:
            ``python`` (a tuple), ``numpy`` (a dict or None), ``torch`` (a uint8 tensor), ``device_type`` (a
            string, or None where no accelerator is in use) and ``device`` (a uint8 tensor or None).
        """
        device_type = _accelerator()
        if device_type is not None and not _in_use(device_type):
            device_type = None
        return {
            "python": random.getstate(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
            "device_type": device_type,
            "device": torch.get_device_module(device_type).get_rng_state() if device_type else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states. A device generator is restored only on the same kind of device.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            CheckpointError: The state is malformed; all generators are as they were.
        """
        before = self.state_dict()
        try:
            _restore(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            _restore(before)
            raise CheckpointError(
                "the random number generator state is malformed. Restore its files, or delete them to "
                "begin with fresh generators."
            ) from error

    def load_resharded(self, states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int) -> None:
        """Take up the states of a job with another number of ranks.

        Every rank takes the state of the saved rank with its number, counted round. Ranks beyond the saved
        ones would repeat the numbers of others, so their generators are seeded anew from that state and their
        own rank. Random numbers are then reproducible, but not those of the uninterrupted run.

        Args:
            states: The states by saved rank.
            rank: This rank.
            world_size: Number of ranks now.
        """
        if rank == 0:
            _logger.warning(
                "random numbers will differ from an uninterrupted run: saved by %d ranks, loaded by %d",
                len(states),
                world_size,
            )
        self.load_state_dict(states[rank % len(states)])
        if rank >= len(states):
            _seed_anew(rank)


def _restore(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        _restore_numpy(state["numpy"])
    _restore_device(state["device_type"], state["device"])


def _seed_anew(rank: int) -> None:
    random.seed(f"{random.getrandbits(64)} {rank}")
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


def _restore_device(saved_type: str | None, state: torch.Tensor | None) -> None:
    here = _accelerator()
    if saved_type is not None and saved_type == here:
        torch.get_device_module(saved_type).set_rng_state(state)
    elif saved_type is not None or (here is not None and _in_use(here)):
        _logger.warning(
            "random numbers on the device will differ: saved on %s, this process runs on %s",
            saved_type or "the CPU alone",
            here or "the CPU alone",
        )


def _in_use(device_type: str) -> bool:
    # Asking an idle device for its state would create a context on it, which costs memory and breaks forks.
    is_initialized = getattr(torch.get_device_module(device_type), "is_initialized", None)
    return bool(is_initialized()) if is_initialized is not None else True


def _accelerator() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def _numpy_state() -> dict[str, object] | None:
    # A process that has not imported numpy has no numpy numbers to reproduce.
    numpy = sys.modules.get("numpy")
    if numpy is None or "numpy.random" not in sys.modules:
        return None
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    return _plain(state)


def _plain(state: Mapping[str, Any]) -> dict[str, object]:
    """Generator state with arrays as lists and scalars as Python numbers."""
    plain: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            plain[key] = _plain(value)
        elif hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0:
            plain[key] = {"dtype": str(value.dtype), "values": value.tolist()}
        else:
            plain[key] = value.item() if hasattr(value, "item") else value
    return plain


def _restore_numpy(state: Mapping[str, Any]) -> None:
    try:
        import numpy
    except ImportError:
        _logger.warning("numpy is not installed here, so its saved random state is left out")
        return
    numpy.random.set_state(_with_arrays(state, numpy))


def _with_arrays(state: Mapping[str, Any], numpy: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict) and set(value) == {"dtype", "values"}:
            result[key] = numpy.asarray(value["values"], dtype=value["dtype"])
        else:
            result[key] = _with_arrays(value, numpy) if isinstance(value, dict) else value
    return result
