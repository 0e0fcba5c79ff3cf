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


def masked_dummy(batch: Batch) -> Batch:
    """A copy of a batch that a model can take but no loss counts.

    Every tensor under the key ``labels`` is filled with -100, or with "not a number" if it is floating, and
    every floating-point tensor under the key ``weight`` or ``weights`` with zero; all else is kept, so that a
    forward pass stays valid. The copy has the types and shapes of the batch and shares no tensor with it.

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
        if value.is_floating_point():
            return torch.full_like(value, torch.nan)
        if value.is_complex() or not value.dtype.is_signed:
            raise DataError(_refusal(f"labels of type {value.dtype}, which cannot hold {IGNORED_LABEL}"))
        return torch.full_like(value, IGNORED_LABEL)
    if key in _WEIGHTS and value.is_floating_point():
        return torch.zeros_like(value)
    return value.clone()


def _refusal(what: str) -> str:
    return (
        f"uneven='pad' replaces missing batches by masked dummies, and cannot mask {what}; give mappings "
        f"with 'labels' of a signed integer type (masked with {IGNORED_LABEL}), as of labels.long(), or "
        "of a floating type (masked with nan), or a make_dummy function of your own, or choose uneven='stop'"
    )
