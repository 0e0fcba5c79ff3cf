"""The state that an optimizer keeps for each parameter, and the tensors inside of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoint_core import CheckpointError, OptimizerState
from dist_env import get_logger
from trainer_core import Multiopt

from .combining import RankCombiner

logger = get_logger(__name__)

Path = tuple[str | int, ...]
ByName = dict[str, dict[str, Any]]
Entry = tuple[MutableMapping[Tensor, Any], Tensor, dict[str, Any]]
"""The states of an optimizer, a parameter, and its own state."""


class NamedOptimizerState:
    """What an optimizer keeps for each parameter, by the parameter's name.

    Args:
        optimizer: The optimizer.
        model: The model that owns its parameters.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._named = OptimizerState(optimizer, model)

    def live(self) -> ByName:
        """The optimizer's own dicts, for parameters that have something in them."""
        kept = ((name, self._optimizer.state.get(p)) for name, p in self._named.by_name().items())
        return {name: values for name, values in kept if values}

    def leaves(self, names: Iterable[str]) -> dict[tuple[str, Path], Tensor]:
        """The tensors in the state of some parameters, in an order that is the same on all ranks."""
        live = self.live()
        return {(name, path): value for name in names for path, value in tensors_in(live[name])}

    def state(self, replace: Callable[[Tensor], object]) -> dict[str, object]:
        """The state by name as a checkpoint holds it, with something in the place of each tensor."""
        state = table_of("the state of the optimizer", self._named.state_dict()["state"])
        return {name: with_tensors(values, replace) for name, values in state.items()}

    def load(self, state: Mapping[str, object]) -> None:
        """Put state by name into the optimizer; its options stay.

        Raises:
            checkpoint_core.CheckpointError: If it is of other parameters.
        """
        self._named.load_state_dict({"parameters": self._named.state_dict()["parameters"], "state": state})

    def take_out_others(self, names: Collection[str]) -> list[Entry]:
        """Remove the state of all but some parameters; the optimizer is then as if it had not used them.

        Returns:
            What `put_in` takes.
        """
        members = self._optimizer.optimizers if isinstance(self._optimizer, Multiopt) else (self._optimizer,)
        kept = set(names)
        others = [p for name, p in self._named.by_name().items() if name not in kept]
        found = [(member.state, p) for p in others for member in members if p in member.state]
        return [(states, p, states.pop(p)) for states, p in found]

    def put_in(self, entries: Sequence[Entry]) -> None:
        """Put back what `take_out_others` returned."""
        for states, parameter, values in entries:
            states[parameter] = values

    def uniform(self, ranks: RankCombiner) -> list[str]:
        """Names of the parameters whose state has the same form on all ranks; collective.

        A parameter that only some ranks have used has state only there, of which there is no mean.
        """
        live = self.live()
        names = self._named.names()
        same = ranks.same_on_all_ranks([_fingerprint(live.get(name)) for name in names])
        other = [name for name, is_same in zip(names, same, strict=True) if not is_same]
        if other:
            logger.info(
                "the mean of the optimizer's state leaves out %d parameters that not all ranks have used "
                "alike, the first is %s",
                len(other),
                other[0],
            )
        return [name for name, is_same in zip(names, same, strict=True) if is_same and name in live]


def _fingerprint(values: dict[str, Any] | None) -> int:
    """A number for the form of some state: tensors by dtype and shape, everything else by value."""
    form = None
    if values is not None:
        tensors = [(path, str(value.dtype), tuple(value.shape)) for path, value in tensors_in(values)]
        form = (
            tensors,
            sorted((str(key), with_tensors(item, lambda _: "tensor")) for key, item in values.items()),
        )
    return int.from_bytes(blake2b(repr(form).encode(), digest_size=8).digest()) >> 2


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, so that an accelerator has its memory for training."""
    return tensor.detach().to("cpu", copy=True)


def tensors_in(value: object, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in nested dicts, lists and tuples, in an order that depends on keys alone.

    Args:
        value: What to look through.
        path: Keys and indices on the way to it.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key], (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*path, index))


def with_tensors(value: object, replace: Callable[[Tensor], object]) -> object:
    """Nested dicts, lists and tuples with something in the place of each tensor.

    Args:
        value: What to rebuild; it stays as it is. Containers of other kinds, which no checkpoint takes, are
            not looked into.
        replace: Returns what takes a tensor's place.
    """
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        return type(value)((key, with_tensors(item, replace)) for key, item in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(with_tensors(item, replace) for item in value)
    return value


def table_of(what: str, saved: object) -> Mapping[str, object]:
    """A saved value that has to be a table.

    Args:
        what: What it is, for the message.
        saved: The value.

    Raises:
        CheckpointError: If it is something else.
    """
    if not isinstance(saved, Mapping):
        raise _misfit(f"{what} in the checkpoint must be a table by name", saved)
    return saved


def tensors_of(what: str, saved: object) -> dict[str, Tensor]:
    """Saved tensors by name.

    Args:
        what: What they are, for the message.
        saved: The value.

    Raises:
        CheckpointError: If it is something else.
    """
    table = table_of(what, saved)
    tensors = {name: value for name, value in table.items() if isinstance(value, Tensor)}
    if len(tensors) < len(table):
        other = next(name for name in table if name not in tensors)
        raise _misfit(f"{other} of {what} in the checkpoint must be a tensor", table[other])
    return tensors


def _misfit(rule: str, saved: object) -> CheckpointError:
    return CheckpointError(f"{rule}, got {type(saved).__name__}. Resume from another checkpoint.")


def check_names(what: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model.

    Args:
        what: What they are, for the message.
        given: The tensors by name.
        wanted: Tensors of the names and shapes that they must have.

    Raises:
        CheckpointError: Naming the first tensor that is missing, unknown or of another shape.
    """
    for name in dict.fromkeys([*wanted, *given]):
        here, there = _form(wanted.get(name)), _form(given.get(name))
        if here != there:
            raise CheckpointError(
                f"{what} in the checkpoint does not fit the model: {name} is {there} in the checkpoint and "
                f"{here} in the model. Build the model as when the checkpoint was saved."
            )


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"of shape {list(tensor.shape)}"


@torch.no_grad()
def put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy second tensors into the first ones of pairs."""
    for tensor, copy in copies:
        tensor.copy_(copy)
