"""Batches of any structure: moved, copied, taken apart, and masked so that they count for nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, TypeVar, cast

import torch

from dataloader_dispatch.rows import cannot_mask, ignored_like

Batch = TypeVar("Batch")

Uneven = Literal["stop", "pad", "error"]

_WEIGHTS = ("weight", "weights")
_IMMUTABLE = (str, bytes, int, float, complex, type(None))


def masked_dummy(batch: Batch) -> Batch:
    """A copy of a batch that a model can take but no loss counts.

    Every tensor under the key ``labels`` is filled with -100, or with "not a number" if it is floating (of a
    kind of its own, see `is_ignored`), and every floating-point tensor under the key ``weight`` or
    ``weights`` with zero; all else is kept, so that a forward pass stays valid. The copy has the types and
    shapes of the batch and shares no tensor with it.

    Args:
        batch: A mapping with the key ``labels``: a tensor, or a structure of tensors, of a signed integer or
            a floating type. Values may be nested mappings, lists, tuples and named tuples.

    Returns:
        The dummy.

    Raises:
        DataError: The batch is not a mapping, has no ``labels``, or they can hold neither.
    """
    keys = batch.keys() if isinstance(batch, Mapping) else None
    if keys is None:
        raise cannot_mask(f"a batch of type {type(batch).__name__}, which is not a mapping")
    if "labels" not in keys:
        raise cannot_mask(f"a batch with the keys {sorted(map(str, keys))}, without 'labels'")
    return _alike(batch, _masked)


def _masked(value: object, key: object) -> object:
    if isinstance(value, torch.Tensor):
        return _masked_tensor(value.detach(), key)
    if key == "labels":
        raise cannot_mask(f"labels of type {type(value).__name__}, which is not a tensor")
    return copy.deepcopy(value)


def _masked_tensor(value: torch.Tensor, key: object) -> torch.Tensor:
    if key == "labels":
        return ignored_like(value)
    if key in _WEIGHTS and value.is_floating_point():
        return torch.zeros_like(value)
    return value.clone()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on a device, copied without waiting where memory is page-locked.

    Args:
        batch: Tensors in mappings, lists, tuples and named tuples, nested as you like; other objects that
            have a method ``to`` are moved by it, and all else stays as it is.
        device: Where to.

    Returns:
        A new structure of the same types; tensors that are on the device already are the same ones.
    """

    def moved(value: object, _: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=_may_arrive_later(device))
        move = getattr(value, "to", None)
        return move(device) if callable(move) else value

    return _alike(batch, moved)


def _may_arrive_later(device: torch.device) -> bool:
    # What a device computes comes after the copy. The host would read what has not arrived: torch pins the
    # memory of a copy to the host that does not wait, and returns before it is filled.
    return device.type != "cpu"


def dense_to_device(batch: object, device: torch.device) -> object:
    """A batch of the same structure with its dense tensors on a device and detached."""

    def moved(value: object, _: object) -> object:
        if not _is_dense(value):
            return value
        return value.detach().to(device, non_blocking=_may_arrive_later(device))

    return _rebuilt(batch, moved)


def copy_of(batch: Batch) -> Batch:
    """A copy of a batch that shares nothing with it, on the same device."""

    def copied(value: object, _: object) -> object:
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    return _alike(batch, copied)


def _alike(batch: Batch, leaf: Callable[[object, object], object]) -> Batch:
    """As `_rebuilt`, where what becomes of each value has its type."""
    return cast(Batch, _rebuilt(batch, leaf))


def _rebuilt(value: object, leaf: Callable[[object, object], object], key: object = None) -> object:
    """A structure of the same types around what a function makes of each other value.

    Args:
        value: The structure.
        leaf: Given a value, and the innermost key above it; what is below labels or weights has their key.
        key: That of ``value``.
    """
    if isinstance(value, (list, tuple)):
        parts = [_rebuilt(item, leaf, key) for item in value]
        make: Callable[..., object] = type(value)
        return make(*parts) if hasattr(value, "_fields") else make(parts)
    if isinstance(value, torch.Tensor) or not isinstance(value, Mapping):
        return leaf(value, key)
    kept = key in ("labels", *_WEIGHTS)
    items = {name: _rebuilt(item, leaf, key if kept else name) for name, item in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    result = copy.copy(value)  # A type of its own, such as a tokenizer's BatchEncoding.
    result.update(items)
    return result


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for tensor number ``number`` in a batch without its tensors."""

    number: int


def put_together(skeleton: object, tensors: Sequence[torch.Tensor]) -> object:
    """A batch with its tensors in place of slots. Mappings, lists and tuples are new, other values those of
    the skeleton."""
    return _rebuilt(skeleton, lambda value, _: tensors[value.number] if isinstance(value, Slot) else value)


def is_immutable(skeleton: object) -> bool:
    """Whether nothing of a skeleton can be changed once `put_together` has made its containers anew."""
    if isinstance(skeleton, (Slot, *_IMMUTABLE)):
        return True
    if type(skeleton) is dict:
        return all(map(is_immutable, skeleton.values()))
    if not isinstance(skeleton, (list, tuple)) or type(skeleton) not in (list, tuple):
        return False
    return all(map(is_immutable, skeleton))


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
