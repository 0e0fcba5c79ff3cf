"""Batches to a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeVar, cast

import torch

Batch = TypeVar("Batch")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on a device, copied without waiting where memory is page-locked.

    Args:
        batch: Tensors in mappings, lists, tuples and named tuples, nested as you like; other objects that
            have a method ``to`` are moved by it, and all else stays as it is.
        device: Where to.

    Returns:
        A new structure of the same types; tensors that are on the device already are the same ones.
    """

    def moved(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        move = getattr(value, "to", None)
        return move(device) if callable(move) else value

    return cast(Batch, _rebuilt(batch, moved))


def copy_of(batch: Batch) -> Batch:
    """A copy of a batch that shares nothing with it, on the same device."""

    def copied(value: object) -> object:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    return cast(Batch, _rebuilt(batch, copied))


def _rebuilt(value: object, leaf: Callable[[object], object]) -> object:
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, Mapping):
        items = {name: _rebuilt(item, leaf) for name, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        result = copy.copy(value)  # A type of its own, such as a tokenizer's BatchEncoding.
        result.update(items)
        return result
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(item, leaf) for item in value]
        make = cast(Callable[..., object], type(value))
        return make(*parts) if hasattr(value, "_fields") else make(parts)
    return leaf(value)
