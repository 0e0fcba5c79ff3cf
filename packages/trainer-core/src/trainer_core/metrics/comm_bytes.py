"""What a rank hands to collectives: bytes, and each call of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CommBytes:
    """Counts the payload that this rank hands to collectives between ranks.

    It is what an algorithm asks for, whatever the backend makes of it: a ring all-reduce among W ranks sends
    2 (W - 1) / W times as much, and headers come on top.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes since the process began."""

    def add(self, *tensors: Tensor) -> None:
        """Count tensors that take part in a collective."""
        self.bytes += sum(tensor.nbytes for tensor in tensors)


_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "send": "send",
    "recv": "receive",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""What the names of torch's operators begin with, in the order in which to look."""


@dataclass(frozen=True, order=True)
class Collective:
    """Calls of one kind among equally many ranks."""

    kind: str
    """all-gather, reduce-scatter, all-reduce, broadcast, send, receive, ..."""
    ranks: int
    """Ranks that take part in each; for send and receive those of the group, of which two do."""
    calls: int
    """How many this rank makes."""
    bytes: int
    """Payload of them together: of each the larger of what is given and what is got. The backend decides how
    much of it goes over a wire."""


class CollectiveWatch(TorchDispatchMode):
    """While active, notes the collectives of this thread, those of backward passes on the host included."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args, dict(kwargs or {}), result)
        return result

    def found(self) -> tuple[Collective, ...]:
        """What was seen so far, by kind."""
        return tuple(Collective(kind, ranks, *counts) for (kind, ranks), counts in sorted(self._seen.items()))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        if kind is None:
            return  # barriers, and waiting
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        results = result if func.namespace == "_c10d_functional" else None
        size = max((_bytes(value) for value in (*given.values(), results)), default=0)
        calls, before = self._seen.get(key := (kind, _ranks(given)), (0, 0))
        self._seen[key] = (calls + 1, before + size)


def _bytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _ranks(given: Mapping[str, Any]) -> int:
    group = given.get("process_group")
    if group is not None:
        return ProcessGroup.unbox(group).size()
    resolved: ProcessGroup = torch._C._distributed_c10d._resolve_process_group(given["group_name"])
    return resolved.size()
