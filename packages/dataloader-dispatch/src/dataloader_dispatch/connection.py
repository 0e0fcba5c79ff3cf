"""How batches travel: connections to other ranks, batches as bytes, and closing what nobody holds."""

from __future__ import annotations

import _thread
import atexit
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist

from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, DistributedEnvironmentError, decode_value, encode_value

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
        return self._opened().send([buffer], index, tag)

    def receive(self, buffer: torch.Tensor, index: int, tag: int) -> dist.Work:
        """Start to receive from a rank; a shorter message than the buffer leaves its end alone.

        Raises:
            RuntimeError: The connection is broken, or was cut.
        """
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
        if name in _MAPPINGS:
            return name, (value.data, getattr(value, "n_sequences", None))  # type: ignore[attr-defined]
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
