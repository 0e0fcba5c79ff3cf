"""How batches travel: connections to other ranks, batches as bytes, and the messages that a rank is sent.

A stream of records, which are batches, ends and errors, is cut into messages. A message and a record begin
with a header of 64 bytes each.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import math
import os
import pickle
import struct
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataloader_dispatch.errors import DataError
from dist_env import (
    ControlGroup,
    DistributedEnvironmentError,
    RankFailedError,
    RankTimeoutError,
    decode_value,
    encode_value,
)

PROBE_TAG = 3
_MOMENT = timedelta(milliseconds=1)
_BATCH_ENCODING = "transformers.tokenization_utils_base.BatchEncoding"
_MAPPINGS = (
    _BATCH_ENCODING,
    "transformers.feature_extraction_utils.BatchFeature",
    "transformers.image_processing_base.BatchFeature",
)
"""Mappings that tokenizers and processors return. Only these are ever imported for a message."""
_PICKLE = "pickle"


@contextmanager
def data_errors() -> Iterator[None]:
    """What is wrong with the group of a loader, as an error of this package.

    Raises:
        DataError: From the DistributedEnvironmentError of the body.
    """
    try:
        yield
    except DistributedEnvironmentError as error:
        raise DataError(str(error)) from error


def one_line(reason: object) -> str:
    """A reason without line breaks, with its type if it is an error."""
    try:
        text = " ".join(str(reason).split())
    except Exception:  # noqa: BLE001  # an error whose own __str__ raises
        text = ""
    if not isinstance(reason, BaseException):
        return text
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__


@contextmanager
def _left_out_of_traces() -> Iterator[None]:
    """Start a transfer that profilers do not record.

    Batches are asked for ahead, so that a transfer is under way when a profiler stops. With torch 2.13 its
    span is then written into memory that the profiler has freed, which ends the process. A transfer that
    nobody waits for yet would look like exposed communication, too.
    """
    # Private in torch 2.11 to 2.13, and of this thread alone: it has no public equal. Without it, traces of
    # ranks that receive batches end the process; trainer-ddp's test_profile.py fails. A torch without it
    # transfers all the same, and leaves nothing out of traces.
    record: Callable[[bool], None] | None = getattr(torch._C._autograd, "_enable_record_function", None)
    if record is None:
        yield
        return
    record(False)
    try:
        yield
    finally:
        record(True)  # torch does not tell what it was; True is what a thread begins with


class Connection:
    """The connections of this rank to the others of a group.

    Args:
        group: Several ranks.
    """

    def __init__(self, group: ControlGroup) -> None:
        self._transport = group.process_group
        # Receives into it are posted and never answered.
        self._unanswered = torch.zeros(1, dtype=torch.uint8)

    def send(self, buffer: torch.Tensor, index: int, tag: int) -> dist.Work:
        """Start to send to a rank.

        Raises:
            RuntimeError: The connection is broken, or was cut.
        """
        with _left_out_of_traces():
            return self._opened().send([buffer], index, tag)

    def receive(self, buffer: torch.Tensor, index: int, tag: int) -> dist.Work:
        """Start to receive from a rank; a shorter message than the buffer leaves its end alone.

        Raises:
            RuntimeError: The connection is broken, or was cut.
        """
        with _left_out_of_traces():
            return self._opened().recv([buffer], index, tag)

    def fault(self, index: int) -> RuntimeError | None:
        """What is wrong with the connection to a rank."""
        try:
            # A broken connection refuses to post.
            self.receive(self._unanswered, index, PROBE_TAG)
        except RuntimeError as error:
            return error
        return None

    def cut(self, indices: Iterable[int]) -> None:
        """Close all connections to these ranks; every wait for them, on any thread, ends with an error.

        Destroying a process group does not do that while there is a transfer that somebody still holds.
        """
        for index in indices:
            try:
                # gloo closes all connections of a group where a receive times out. It has no other way.
                self.receive(self._unanswered, index, PROBE_TAG).wait(_MOMENT)
            except RuntimeError:
                continue  # as it should
        self._transport = None

    def _opened(self) -> dist.ProcessGroup:
        if self._transport is None:
            raise RuntimeError("the data loader was closed.")
        return self._transport


class BatchCodec:
    """Writes batches as bytes and reads them.

    What `encode_value` takes travels, and what tokenizers and processors of transformers return, without a
    fast tokenizer's own encodings.

    Args:
        unpickle: Let all other values travel as pickles, which run whatever code the sender likes; None where
            that is not a setting.
    """

    def __init__(self, unpickle: bool | None = None) -> None:
        self._unpickle = unpickle

    def encode(self, batch: object, tensors: list[torch.Tensor] | None = None) -> bytes:
        """The bytes of a batch; its dense tensors are appended to ``tensors``, if that is given.

        Raises:
            DataError: A value cannot be sent; names the field.
        """
        try:
            return encode_value(batch, name="batch", tensors=tensors, extend=self._extend)
        except TypeError as error:
            advice = ", or trust all ranks and set unpickle_batches=True" if self._unpickle is False else ""
            raise DataError(
                f"a batch cannot be sent to other ranks: {error}. Let the collate function convert the "
                f"value or leave it out{advice}."
            ) from error

    def decode(self, data: bytes, tensors: Sequence[object] = ()) -> object:
        """The batch of some bytes.

        Args:
            data: The bytes.
            tensors: What to put in place of the tensors that `encode` collected.

        Raises:
            ValueError: The bytes cannot be read.
        """
        return decode_value(data, tensors=tensors, restore=self._restore)

    def _extend(self, value: object) -> tuple[str, object] | None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _MAPPINGS and isinstance(value, UserDict):
            return name, (value.data, getattr(value, "n_sequences", None))
        if not self._unpickle:
            return None
        try:
            return _PICKLE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # a class's own __reduce__ may raise anything
            raise TypeError(f"a {name} does not pickle: {one_line(error)}") from error

    def _restore(self, name: str, value: object) -> object:
        if name == _PICKLE and self._unpickle and isinstance(value, bytes):
            # The one place of all packages where bytes of another process are unpickled.
            try:
                return pickle.loads(value)
            except Exception as error:  # a pickle runs code, which may raise anything
                raise ValueError(f"a value does not unpickle here: {one_line(error)}") from error
        if name not in _MAPPINGS or not isinstance(value, tuple) or len(value) != 2:
            raise ValueError(f"the message holds a {name[:80]!r}, which is not read here")
        module, _, kind = name.rpartition(".")
        more = {"n_sequences": value[1]} if name == _BATCH_ENCODING else {}
        made: object = getattr(import_module(module), kind)(dict(value[0]), **more)
        return made


_unfinished: set[_thread.LockType] = set()
"""One for each action of `run_finalizer` under way, released at its end."""
os.register_at_fork(after_in_child=_unfinished.clear)  # threads of the parent are not here


@atexit.register
def wait_for_finalizers() -> None:
    """Wait for what is under way, before connections are closed: `atexit` goes backwards."""
    for done in list(_unfinished):
        with done:
            pass


def run_finalizer(action: Callable[[], None], *, wait: bool = True) -> None:
    """Run something in a thread of its own, or here where Python is about to end and starts no more threads.

    The garbage collector may close a data loader while torch.compile traces on this thread, where no real
    tensor can be made or sent; or while this thread holds a lock that closing takes. Python waits for it
    before it ends.

    The thread is none of `threading`: starting one of those waits until it runs, which takes locks of that
    module, and the garbage collector may strike where this very thread holds them.

    Args:
        action: What to run.
        wait: Until it has ended.
    """
    done = _thread.allocate_lock()
    done.acquire()
    _unfinished.add(done)
    # What the action holds is let go before Python may end: the last reference to a process group that goes
    # in a thread after that aborts the process.
    actions = [action]
    del action

    def run() -> None:
        try:
            actions.pop()()
        finally:
            _unfinished.discard(done)
            done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        run()
        return
    if wait:
        with done:
            pass


Spec = tuple[torch.dtype, tuple[int, ...]]
ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""
DATA_TAG = 1
ACKNOWLEDGE_TAG = 2
HEADER_BYTES = ALIGNMENT
FIRST_CAPACITY = 1 << 20
"""Bytes of the receives, until a record needs more."""
U32 = struct.Struct("<I")
"""In front of a description: how long its first part is, the types and shapes of the tensors."""
_MESSAGE = struct.Struct("<QQQ")
_RECORD = struct.Struct("<QQQQqd?")
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


def decode_specs(data: bytes) -> list[Spec]:
    """Types and shapes of tensors, from the first part of a description.

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

        They share the memory of the buffer, but are not views of it or of one another: changing one in place
        does not upset what autograd has saved of another.
        """
        storage, device = buffer.untyped_storage(), buffer.device
        return [
            torch.empty(0, dtype=dtype, device=device).set_(
                storage, start // dtype.itemsize + offset, shape, strides
            )
            for dtype, offset, shape, strides in self._places
        ]


@lru_cache
def described(specs: tuple[Spec, ...]) -> tuple[bytes, Layout]:
    """The first part of a description, which `decode_specs` reads behind its length, and the layout."""
    encoded = encode_value([(dtype, *shape) for dtype, shape in specs])
    return U32.pack(len(encoded)) + encoded, Layout(specs)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


class MessageHeader(NamedTuple):
    """The beginning of every message; the next bytes of the stream of records follow.

    Attributes:
        sequence: Number of the message to this destination, from 1.
        num_bytes: How many bytes follow.
        capacity: Bytes that the receive posted in its place is to have.
    """

    sequence: int
    num_bytes: int
    capacity: int

    def write(self, memory: memoryview) -> None:
        """Write it to the beginning of a buffer."""
        _MESSAGE.pack_into(memory, 0, *self)

    @classmethod
    def read(cls, memory: memoryview) -> MessageHeader:
        """Read it from the beginning of a buffer. It has not arrived before its number is there."""
        return cls(*_MESSAGE.unpack_from(memory, 0))


class Kind(IntEnum):
    """What a record holds."""

    BATCH = 1
    END = 2
    FAILURE = 3


_RECORD_KINDS = frozenset(Kind)


class Record(NamedTuple):
    """The beginning of every record, which a description and a payload follow.

    Attributes:
        kind: A `Kind`.
        generation: Number of the pass over the loader, from 1.
        description: Bytes of the description; 0 if it is that of the batch before.
        payload: Bytes of the tensors, or of the failure.
        epoch: Epoch of the next batch.
        progress: Share of the epoch that is over.
        is_dummy: Whether the batch fills up a round and counts for nothing.
    """

    kind: int
    generation: int
    description: int = 0
    payload: int = 0
    epoch: int = 0
    progress: float = 0.0
    is_dummy: bool = False

    @property
    def total(self) -> int:
        """Bytes of the record, with all that follows."""
        return HEADER_BYTES + aligned(self.description) + aligned(self.payload)

    def write(self, memory: memoryview, start: int) -> None:
        """Write it into a buffer."""
        _RECORD.pack_into(memory, start, *self)

    @classmethod
    def read(cls, data: bytes) -> Record:
        """Read it.

        Raises:
            ValueError: It cannot be that of a record.
        """
        record = cls(*_RECORD.unpack_from(data))
        if record.kind not in _RECORD_KINDS or record.total >= 2**56:
            raise ValueError(f"it is of the kind {record.kind} and has {record.total} bytes")
        return record


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
    raise ValueError("the failure of another rank cannot be read. Do all ranks run the same release?")


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
