"""See every operator that runs, and every function that reaches the memory of a tensor without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .replay import has_storage

_READING = frozenset({"tolist", "__deepcopy__"})
_EXPOSING = frozenset(
    {
        "data_ptr",
        "numpy",
        "share_memory_",
        "storage",
        "untyped_storage",
        "__array__",
        "__dlpack__",
        "__reduce_ex__",
    }
)
"""Functions that look at the memory of a tensor, and those that give others the means to."""


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator on plain tensors over; tensor subclasses take theirs apart first."""

    def __init__(self, run: Callable[[Any, tuple[object, ...], dict[str, object]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not needed, since nothing is compiled here, and it would take seconds to import."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if any(_is_composed(kind) for kind in types):
            return NotImplemented
        return self._run(func, args, kwargs or {})


class RawAccessMode(TorchFunctionMode):
    """Tells of functions that look at the memory of a tensor without an operator."""

    def __init__(self, reach: Callable[..., None]) -> None:
        super().__init__()
        self._reach = reach

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in _READING or name in _EXPOSING:
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self._reach(tensor, exposed=name in _EXPOSING)
        return func(*args, **(kwargs or {}))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has values of its own, in a storage."""
    return not is_lazy(tensor) and not _is_composed(type(tensor)) and has_storage(tensor)


def _is_composed(kind: type) -> bool:
    """Whether tensors of this class consist of others."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]
