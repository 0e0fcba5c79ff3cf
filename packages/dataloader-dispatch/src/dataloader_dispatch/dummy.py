"""A batch that counts for nothing, for a rank that has run out of data while others have some left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeVar

import torch

from dataloader_dispatch.errors import DataError

Batch = TypeVar("Batch")

IGNORED_LABEL = -100
"""The label that losses leave out: ``ignore_index`` of `torch.nn.functional.cross_entropy`."""
_WEIGHTS = ("weight", "weights")
_NAN_MARKS = {
    torch.float64: (torch.int64, 0x7FF8_0000_0000_A5A5),
    torch.float32: (torch.int32, 0x7FC0_A5A5),
    torch.bfloat16: (torch.int16, 0x7FE5),
    torch.float16: (torch.int16, 0x7EA5),
}
"""For each floating type the bits of a label that does not count: a quiet "not a number" whose payload (IEEE
754, section 6.2) no division by zero and no `float("nan")` has. Copies to devices and ranks keep the bits."""


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
        DataError: The batch is no mapping, has no ``labels``, or they can hold neither.
    """
    if not isinstance(batch, Mapping):
        raise DataError(_refusal(f"a batch of type {type(batch).__name__}, which is not a mapping"))
    if "labels" not in batch:
        raise DataError(_refusal(f"a batch with the keys {sorted(map(str, batch))}, without 'labels'"))
    return _masked(batch, None)  # type: ignore[return-value]  # the structure of the argument


def ignored_like(labels: torch.Tensor) -> torch.Tensor:
    """Labels that do not count, of the type and shape of others.

    Args:
        labels: Of a signed integer or a floating type.

    Returns:
        A new tensor: -100, or where labels are floating "not a number", which `is_ignored` tells from others.

    Raises:
        DataError: If labels of this type can hold neither.
    """
    if labels.dtype in _NAN_MARKS:
        bits, mark = _NAN_MARKS[labels.dtype]
        filled = torch.empty_like(labels)
        filled.view(bits).fill_(mark)
        return filled
    if labels.is_floating_point():
        return torch.full_like(labels, torch.nan)
    if labels.is_complex() or not labels.dtype.is_signed:
        raise DataError(_refusal(f"labels of type {labels.dtype}, which cannot hold {IGNORED_LABEL}"))
    return torch.full_like(labels, IGNORED_LABEL)


def is_ignored(labels: torch.Tensor) -> torch.Tensor:
    """Which labels do not count: those of -100, and of floating ones those that `ignored_like` gave.

    Any other "not a number" is data that went wrong, and shows in a loss as it does in torch.

    Args:
        labels: Of any type and shape.

    Returns:
        bool, in the shape of the labels.
    """
    if labels.dtype in _NAN_MARKS:
        bits, mark = _NAN_MARKS[labels.dtype]
        return labels.view(bits) == mark
    if labels.is_floating_point():
        return labels.isnan()
    # Held against -100, an unsigned label of 156 would pass for it.
    return labels == IGNORED_LABEL if labels.dtype.is_signed else torch.zeros_like(labels, dtype=torch.bool)


def _masked(value: object, key: object) -> object:
    if isinstance(value, torch.Tensor):
        return _masked_tensor(value.detach(), key)
    if isinstance(value, Mapping):
        return _masked_mapping(value, key)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Callable[..., object] = type(value)
        return make(*(_masked(item, key) for item in value))
    if isinstance(value, list):
        return [_masked(item, key) for item in value]
    if isinstance(value, tuple):
        return tuple(_masked(item, key) for item in value)
    if key == "labels":
        raise DataError(_refusal(f"labels of type {type(value).__name__}, which is not a tensor"))
    return copy.deepcopy(value)


def _masked_mapping(value: Mapping[object, object], key: object) -> object:
    # What is masked as a whole stays masked in its parts, whatever these are called.
    kept = key in ("labels", *_WEIGHTS)
    items = {name: _masked(item, key if kept else name) for name, item in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    result = copy.copy(value)  # A type of its own, such as a tokenizer's BatchEncoding.
    result.update(items)
    return result


def _masked_tensor(value: torch.Tensor, key: object) -> torch.Tensor:
    if key == "labels":
        return ignored_like(value)
    if key in _WEIGHTS and value.is_floating_point():
        return torch.zeros_like(value)
    return value.clone()


def _refusal(what: str) -> str:
    return (
        f"uneven='pad' replaces missing batches by masked dummies, and cannot mask {what}; give mappings "
        f"with 'labels' of a signed integer type (masked with {IGNORED_LABEL}), as of labels.long(), or "
        "of a floating type (masked with nan), or a make_dummy function of your own, or choose uneven='stop'"
    )
