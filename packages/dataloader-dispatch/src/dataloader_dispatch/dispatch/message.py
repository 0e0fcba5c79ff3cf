"""What travels between ranks: a header of 64 bytes, perhaps a description, and the bytes of batches."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from dataloader_dispatch.dispatch.layout import ALIGNMENT

DATA_TAG = 1
ACKNOWLEDGE_TAG = 2
PROBE_TAG = 3
HEADER_BYTES = ALIGNMENT
FIRST_CAPACITY = 1 << 16
"""Bytes of the first receives, before anything is known about the batches."""
U32 = struct.Struct("<I")
"""In front of a description: how long its first part is, the types and shapes of the tensors."""
_FORMAT = struct.Struct("<QIIQQQqdI")
_STANDING = struct.Struct("<qd?")
_SEQUENCE = struct.Struct("<Q")


class Kind(IntEnum):
    """What a message says."""

    BATCH = 1
    MORE = 2
    """The rest of the message before it, which did not fit into one receive."""
    END = 3
    FAILURE = 4


class Header(NamedTuple):
    """The beginning of every message.

    Attributes:
        sequence: Number of the message to this destination, from 1.
        kind: A `Kind`.
        generation: Number of the pass over the loader, from 1, in which it was sent.
        description: Bytes of the description; 0 if it is that of the batch before.
        payload: Bytes of the tensors, or of the failure.
        capacity: Bytes that the receive posted in place of this message's first one is to have.
        epoch: Epoch of the next batch.
        progress: Share of the epoch that is over.
        rounds: Number of batches in it.
    """

    sequence: int
    kind: int
    generation: int
    description: int
    payload: int
    capacity: int
    epoch: int
    progress: float
    rounds: int

    def write(self, memory: memoryview) -> None:
        """Write it to the beginning of a buffer."""
        _FORMAT.pack_into(memory, 0, *self)

    @classmethod
    def read(cls, memory: memoryview) -> Header:
        """Read it from the beginning of a buffer."""
        return cls(*_FORMAT.unpack_from(memory, 0))


def write_standing(memory: memoryview, start: int, epoch: int, progress: float, is_dummy: bool) -> None:
    """Write, in front of one batch of several, where the loader stands behind it, and whether it counts for
    nothing; takes `HEADER_BYTES`."""
    _STANDING.pack_into(memory, start, epoch, progress, is_dummy)


def read_standing(memory: memoryview, start: int) -> tuple[int, float, bool]:
    """What `write_standing` wrote: epoch, progress, and whether the batch is a dummy."""
    epoch, progress, is_dummy = _STANDING.unpack_from(memory, start)
    return epoch, progress, is_dummy


def arrived(memory: memoryview, sequence: int) -> bool:
    """Whether at least the number of a message has reached a buffer that `forget` was called for."""
    return bool(_SEQUENCE.unpack_from(memory, 0)[0] == sequence)


def forget(memory: memoryview) -> None:
    """Prepare a buffer for `arrived`."""
    _SEQUENCE.pack_into(memory, 0, 0)


def memory_of(buffer: torch.Tensor) -> memoryview:
    """The bytes of a buffer on the CPU."""
    return buffer.numpy().data
