"""Sends that take their time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SlowSends(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which what is sent stays to its end, as if no neighbour were ready for it before.

    Schedules of several stages a rank do not wait for what they send, and the sender keeps it until it has
    gone; when that is depends on the neighbours. Imagined ones would take it at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and func._opname == "send":
            self._kept.append(args[0])
        return func(*args, **(kwargs or {}))
