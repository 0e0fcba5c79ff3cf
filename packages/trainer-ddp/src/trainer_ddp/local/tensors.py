"""Copies of tensors, tensors inside nested state, and whether tensors fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from checkpoint_core import CheckpointError

Path = tuple[str | int, ...]


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
                f"{here} in the model; build the model as when the checkpoint was saved"
            )


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"of shape {list(tensor.shape)}"


@torch.no_grad()
def put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Copy second tensors into the first ones of pairs."""
    for tensor, copy in copies:
        tensor.copy_(copy)
