"""Counts the bytes of tensors that are alive, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the memory behind what operators return, once per storage, until it is freed.

    It sees the tensors that autograd keeps, those that recomputation and caches keep, and what comes and goes
    in between. What a kernel allocates inside itself it does not see.

    Args:
        uncounted: Tensors whose memory belongs to somebody else, such as parameters.
    """

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive at a time."""
        self._uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self._known: dict[int, object] = {id(storage): storage for storage in self._uncounted}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= size

        # torch keeps the Python object of a storage for as long as the memory lives.
        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
