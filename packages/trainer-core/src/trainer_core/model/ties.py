"""Remember which parameters and buffers of a model are one and the same, and make them so again."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torch import Tensor, nn


class Place(NamedTuple):
    """Where a module holds a tensor."""

    module: nn.Module
    name: str

    def get(self) -> Tensor:
        """The tensor that is there now."""
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there; by setattr, since modules such as nn.LSTM keep track of it."""
        setattr(self.module, self.name, tensor)


class Ties:
    """The shared parameters and buffers of a model, as they are now.

    Moving a model to another device breaks shared buffers, and allocating its parameters anew breaks tied
    parameters.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        places: dict[int, list[Place]] = defaultdict(list)
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    places[id(tensor)].append(Place(module, name))
        self._shared = [group for group in places.values() if len(group) > 1]

    def restore(self) -> None:
        """Put the tensor of the first place of each group at all its places."""
        for first, *others in self._shared:
            for other in others:
                if other.get() is not first.get():
                    other.put(first.get())
