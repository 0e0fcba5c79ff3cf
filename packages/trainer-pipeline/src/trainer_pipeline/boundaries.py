"""What hidden states look like between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .microbatches import Microbatch

Key = tuple[tuple[int, ...], ...]


class Hidden(NamedTuple):
    """A hidden state without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Boundaries:
    """The hidden state behind each stage but the last one, learnt once for microbatches that are alike."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[Hidden, ...]] = {}

    def of(self, microbatch: Microbatch) -> tuple[Hidden, ...] | None:
        """What they look like for a microbatch; None if that is not known.

        Where two unlike microbatches had hidden states of the shape of their labels and the same features
        behind it, those of all others have that too.
        """
        key = key_of(microbatch)
        if key in self._known:
            return self._known[key]
        rest = {tuple(_features(labels, hidden) for hidden in found) for (labels, *_), found in self._items()}
        shapes = {labels for (labels, *_), _ in self._items()}
        if len(rest) != 1 or len(shapes) < 2:
            return None
        (features,) = rest
        if any(each is None for each in features):
            return None
        return tuple(Hidden((*key[0], *each.shape), each.dtype) for each in features if each is not None)

    def learn(self, microbatch: Microbatch, found: Mapping[int, Hidden]) -> tuple[Hidden, ...]:
        """Take in what was seen behind each stage."""
        hidden = tuple(found[stage] for stage in sorted(found))
        self._known[key_of(microbatch)] = hidden
        return hidden

    def _items(self) -> Sequence[tuple[Key, tuple[Hidden, ...]]]:
        return list(self._known.items())


def key_of(microbatch: Microbatch) -> Key:
    """The shapes of all tensors of a microbatch, those of the labels first."""
    tensors = [value for value in microbatch.inputs.values() if isinstance(value, Tensor)]
    return (tuple(microbatch.labels.shape), *(tuple(tensor.shape) for tensor in tensors))


def _features(labels: tuple[int, ...], hidden: Hidden) -> Hidden | None:
    """What a hidden state has behind rows and positions; None if it does not begin with these."""
    if len(labels) < 2 or hidden.shape[: len(labels)] != labels:
        return None
    return Hidden(hidden.shape[len(labels) :], hidden.dtype)
