"""What a rank sends: bytes handed to collectives."""

from __future__ import annotations

from torch import Tensor


class Traffic:
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
