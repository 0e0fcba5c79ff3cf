"""Changing the tensors in a batch, whatever its structure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Batch = TypeVar("Batch")

_IMMUTABLE = (str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for tensor number ``number`` in a batch without its tensors."""

    number: int


def put_together(skeleton: object, tensors: Sequence[torch.Tensor]) -> object:
    """A batch with its tensors in place of slots. Mappings, lists and tuples are new, other values those of
    the skeleton."""
    return _map(skeleton, _is_slot, lambda slot: tensors[slot.number])


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """A batch of the same structure with each dense tensor changed."""
    return _map(batch, _is_dense, change)  # type: ignore[return-value]  # the structure of the argument


def is_immutable(skeleton: object) -> bool:
    """Whether nothing of a skeleton can be changed once `put_together` has made its containers anew."""
    if isinstance(skeleton, (Slot, *_IMMUTABLE)):
        return True
    if type(skeleton) is dict:
        return all(map(is_immutable, skeleton.values()))
    return type(skeleton) in (list, tuple) and all(map(is_immutable, skeleton))  # type: ignore[call-overload]


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)


def _is_slot(value: object) -> bool:
    return isinstance(value, Slot)


def _map(value: object, is_leaf: Callable[[object], bool], change: Callable[..., object]) -> object:
    if is_leaf(value):
        return change(value)
    kind = type(value)
    if kind is dict:
        return {key: _map(item, is_leaf, change) for key, item in value.items()}  # type: ignore[attr-defined]
    if kind is list:
        return [_map(item, is_leaf, change) for item in value]  # type: ignore[attr-defined]
    if kind is tuple:
        return tuple([_map(item, is_leaf, change) for item in value])  # type: ignore[attr-defined]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = kind
        return make(*(_map(item, is_leaf, change) for item in value))
    if isinstance(value, MutableMapping):
        return _map_mapping(value, is_leaf, change)
    return value


def _map_mapping(
    value: Mapping[object, object], is_leaf: Callable[[object], bool], change: Callable[..., object]
) -> object:
    """A mapping of a type of its own, such as a tokenizer's BatchEncoding, keeps it."""
    result = copy.copy(value)
    result.update({key: _map(item, is_leaf, change) for key, item in value.items()})  # type: ignore[attr-defined]
    return result
