"""What an operator does to the tensors that it is given, as far as recording needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .replay import dense

_OVERWRITING = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Operators that set every element of their first argument, whatever it was."""
_BLIND = frozenset(
    {
        "aten::empty_like",
        "aten::full_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_full",
        "aten::new_ones",
        "aten::new_zeros",
        "aten::ones_like",
        "aten::rand_like",
        "aten::randint_like",
        "aten::randn_like",
        "aten::zeros_like",
    }
)
"""Operators that look at the shape of their argument only."""


@cache
def changes_geometry_only(operator: Any) -> bool:
    """Whether an operator changes how a tensor lies in its storage and nothing else."""
    return torch.Tag.inplace_view in operator.tags and operator._schema.name != "aten::resize_"


@cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    places = enumerate(operator._schema.arguments)
    return tuple((k, a.name) for k, a in places if a.alias_info is not None and a.alias_info.is_write)


def written_tensors(operator: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    return dense([args[k] if k < len(args) else kwargs.get(name) for k, name in _written_places(operator)])


def looks_at_shapes_only(operator: Any) -> bool:
    """Whether the values of the operator's arguments have no influence."""
    return operator._schema.name in _BLIND


def overwrites(operator: Any, args: tuple[object, ...], tensors: list[Tensor], nbytes: int) -> bool:
    """Whether an operator sets the whole storage of its first tensor without looking at it.

    Args:
        operator: The operator.
        args: Its positional arguments.
        tensors: All tensors with a storage among its arguments.
        nbytes: The size of the first one's storage.
    """
    if operator._schema.name not in _OVERWRITING or tensors[0] is not args[0]:
        return False
    first, *others = tensors
    whole = first.numel() * first.element_size() == nbytes
    address = first.untyped_storage()._cdata
    return whole and _is_dense(first) and all(other.untyped_storage()._cdata != address for other in others)


def devices_used(tensors: list[Tensor], kwargs: Mapping[str, object]) -> set[torch.device]:
    """The devices whose default generators an operator may use."""
    asked = kwargs.get("device")
    found = {torch.device("cpu"), *(tensor.device for tensor in tensors)}
    return found | {asked} if isinstance(asked, torch.device) and asked.type != "meta" else found


def _is_dense(tensor: Tensor) -> bool:
    """Whether each place between the first and the last element belongs to one element."""
    dense_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != dense_stride:
            return False
        dense_stride *= size
    return True
