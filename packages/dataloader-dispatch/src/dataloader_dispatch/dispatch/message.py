"""What travels between ranks: a header of 64 bytes, and the bytes of descriptions, batches or errors."""

from __future__ import annotations

import builtins
import math
import struct
import traceback
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch

from dataloader_dispatch.connection import one_line
from dataloader_dispatch.errors import DataError
from dist_env import RankFailedError, RankTimeoutError, decode_value, encode_value

Spec = tuple[torch.dtype, tuple[int, ...]]

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""
DATA_TAG = 1
ACKNOWLEDGE_TAG = 2
HEADER_BYTES = ALIGNMENT
FIRST_CAPACITY = 1 << 16
"""Bytes of the first receives, before anything is known about the batches."""
U32 = struct.Struct("<I")
"""In front of a description: how long its first part is, the types and shapes of the tensors."""
_FORMAT = struct.Struct("<QIIQQQqdI")
_STANDING = struct.Struct("<qd?")
_SEQUENCE = struct.Struct("<Q")

# Those that end an iteration would end it in silence, and the roots of all say nothing that others can catch.
_NOT_SENT = (StopIteration, StopAsyncIteration, GeneratorExit, BaseException, Exception)
_KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (*vars(builtins).values(), DataError)
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind not in _NOT_SENT
}


def aligned(num_bytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is at least ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@lru_cache
def encode_specs(specs: tuple[Spec, ...]) -> bytes:
    """Types and shapes as bytes."""
    return encode_value([(dtype, *shape) for dtype, shape in specs])


def decode_specs(data: bytes) -> list[Spec]:
    """Types and shapes of tensors that `encode_specs` wrote.

    Raises:
        ValueError: The bytes say something else, or tensors of impossible sizes.
    """
    rows = decode_value(data)
    if not isinstance(rows, list) or not all(map(_is_spec, rows)):
        raise ValueError("the message describes no tensors")
    return [(dtype, tuple(shape)) for dtype, *shape in rows]


def _is_spec(row: object) -> bool:
    if not isinstance(row, tuple) or not row or not isinstance(row[0], torch.dtype):
        return False
    sizes = [size for size in row[1:] if type(size) is int and size >= 0]
    return len(sizes) == len(row) - 1 and math.prod(max(size, 1) for size in sizes) < 2**56


def spec_of(tensors: Sequence[torch.Tensor]) -> tuple[Spec, ...]:
    """Type and shape of each tensor."""
    return tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])


class Layout:
    """Where each of some tensors lies in a buffer, one behind the other, each at a multiple of `ALIGNMENT`.

    Args:
        specs: Type and shape of each tensor.

    Attributes:
        num_bytes: Size of all together.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._places: list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]] = []
        self.num_bytes = 0
        for dtype, shape in specs:
            self._places.append((dtype, self.num_bytes // dtype.itemsize, shape, _strides(shape)))
            self.num_bytes += aligned(math.prod(shape) * dtype.itemsize)

    def tensors_in(self, buffer: torch.Tensor, start: int) -> list[torch.Tensor]:
        """The tensors that lie in a buffer from byte ``start`` on, a multiple of `ALIGNMENT`.

        They share the memory of the buffer, but are no views of it or of one another: changing one in place
        does not upset what autograd has saved of another.
        """
        storage, device = buffer.untyped_storage(), buffer.device
        return [
            torch.empty(0, dtype=dtype, device=device).set_(
                storage, start // dtype.itemsize + offset, shape, strides
            )
            for dtype, offset, shape, strides in self._places
        ]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


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


def encode_error(error: BaseException, where: str) -> bytes:
    """An error as bytes.

    Args:
        error: What was raised.
        where: Rank and host it was raised on.
    """
    if isinstance(error, RankFailedError):
        return encode_value(("failed", str(error), error.rank))
    if isinstance(error, RankTimeoutError):
        return encode_value(("late", str(error), error.missing))
    trace = "".join(traceback.format_exception(error))
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return encode_value(("raised", *_kind_and_arguments(error), notes, where, trace))


def decode_error(payload: bytes) -> BaseException:
    """The error of `encode_error`.

    One of Python's own comes as itself, another one as the nearest of these that it is derived from, with its
    type and text: no code of a class is run that another rank has named.

    Raises:
        ValueError: The bytes are not those of an error.
    """
    match decode_value(payload):
        case ("failed", str(text), int() | None as rank):
            return RankFailedError(text, rank)
        case ("late", str(text), dict() as missing):
            return RankTimeoutError(text, missing)
        case ("raised", str(kind), tuple(arguments), list(notes), str(where), str(trace)) if kind in _KINDS:
            error = _made(kind, arguments)
            for note in notes:
                error.add_note(str(note))
            note_origin(error, where)
            error.add_note(f"Traceback of {where}:\n{trace}")
            return error
    raise ValueError("the failure of another rank cannot be read; do all ranks run the same release?")


def note_origin(error: BaseException, where: str) -> None:
    """Note on an error which rank's loader raised it."""
    error.add_note(f"Raised by the data loader of {where}")


def _kind_and_arguments(error: BaseException) -> tuple[str, tuple[object, ...]]:
    """The kind to raise an error as, and the arguments to make one that says the same."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values()), "RuntimeError")
    if type(error) is _KINDS[name]:
        # Not `args`, beside which an OSError keeps the name of its file.
        arguments = tuple(error.__reduce__()[1])
        try:
            encode_value(arguments)
            if str(_KINDS[name](*arguments)) == str(error):
                return name, arguments
        except TypeError:
            pass  # An argument is an object that stays here; its text is sent.
    told = (one_line(error),)
    return (name, told) if type(_made(name, told)) is _KINDS[name] else ("RuntimeError", told)


def _made(name: str, arguments: tuple[object, ...]) -> BaseException:
    try:
        return _KINDS[name](*arguments)
    except TypeError:  # One that takes other arguments, such as a UnicodeDecodeError.
        return RuntimeError(*arguments)
