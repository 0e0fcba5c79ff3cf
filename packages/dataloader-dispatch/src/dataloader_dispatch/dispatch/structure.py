"""Taking a batch apart into its tensors and the rest, and putting it together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple, TypeVar

import torch

Batch = TypeVar("Batch")

_IMMUTABLE = (str, bytes, int, float, complex, type(None))


class Slot(NamedTuple):
    """Stands for tensor number ``number`` in what is left of a batch without its tensors."""

    number: int


def take_apart(batch: object) -> tuple[object, list[torch.Tensor]]:
    """A batch with a `Slot` in place of each dense tensor, and these tensors.

    Looks into mappings, lists, tuples and named tuples, nested as they like. Everything else stays in place:
    so do sparse, quantized and nested tensors.
    """
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return _map(batch, _is_dense, keep), tensors


def put_together(skeleton: object, tensors: Sequence[torch.Tensor]) -> object:
    """The reverse of `take_apart`. Mappings, lists and tuples are new, other values those of the skeleton."""
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
    plain = isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.layout is torch.strided and not value.is_quantized and not value.is_meta  # type: ignore[attr-defined]


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
