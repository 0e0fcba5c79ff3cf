"""Ranks that exchange messages about their data, and the words for one that is lost."""

from __future__ import annotations

import _thread
import atexit
import os
import pickle
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dataloader_dispatch.errors import DataError
from dist_env import RankFailedError, decode_value, encode_value

T = TypeVar("T")

MOST_BYTES = 1 << 24
"""Of a message about the data; batches may be larger."""
_ROLL_CALL_SECONDS = 5.0
"""How long the ranks are asked who is still there, after a connection between them broke."""
_LOOK_SECONDS = 0.2
_SHORTEST_PAUSE = 2e-5
_LONGEST_PAUSE = 1e-3

# How many groups were made of the same ranks: their names in the store must differ, and the names that
# torch.distributed gives repeat when a group is destroyed and another one is made.
_made: Counter[tuple[int, ...]] = Counter()
_open: weakref.WeakSet[RankGroup] = weakref.WeakSet()
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


@atexit.register
def _close_all() -> None:
    """A connection that outlives the interpreter can abort the process."""
    for group in list(_open):
        group.close()


class RankGroup:
    """Connections of their own among some ranks, over gloo: beside any training backend, from any thread.

    Making it is collective among its ranks. With one rank nothing is opened.

    Args:
        ranks: Global ranks that take part, this one among them; the first is the root.
        timeout_seconds: How long an exchange of the group may take.

    Attributes:
        ranks: The global ranks.
        index: Position of this rank among them.
        process_group: The connections; None with one rank. `torch.distributed` does not know them.

    Raises:
        DataError: ``timeout_seconds`` is not positive, or there are several ranks and no default process
            group.
        RankFailedError: A rank did not take part; named where it can be told.
    """

    def __init__(self, ranks: Sequence[int], timeout_seconds: float) -> None:
        if not timeout_seconds > 0:
            raise DataError(f"timeout_seconds={timeout_seconds!r} is out of range; it must be positive")
        self.ranks = tuple(ranks)
        self.timeout_seconds = timeout_seconds
        self.process_group: dist.ProcessGroup | None = None
        self.index = 0
        self._hosts = [socket.gethostname()]
        if len(self.ranks) > 1:
            self._connect()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def name(self, index: int) -> str:
        """Rank and host of one of the ranks, for messages."""
        return f"rank {self.ranks[index]} ({self._hosts[index]})"

    def store(self, name: str) -> Store:
        """The job's store, under keys that no other group and no other name shares."""
        return PrefixStore(name, self._store)

    def all_reduce_max(self, tensor: torch.Tensor) -> dist.Work:
        """Start to replace each element by the largest of all ranks; a CPU tensor."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._connected().allreduce([tensor], options)

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start to replace a CPU tensor by that of the rank at position ``source``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._connected().broadcast([tensor], options)

    def all_gather(self, received: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
        """Start to put the CPU tensors of all ranks, equally large, into ``received``."""
        return self._connected().allgather([received], [tensor])

    def gather(self, doing: str, value: T) -> list[T]:
        """The values of all ranks, in their order. Collective.

        Args:
            doing: What the ranks are doing, for the message.
            value: Something short that `encode_value` takes, of the same type on every rank.

        Raises:
            RankFailedError: A rank is lost, or its message cannot be read.
        """
        if self.size == 1:
            return [value]
        message = encode_value(value)
        sizes = [int(size) for size in self._gather_tensors(doing, torch.tensor([len(message)]))]
        self.check_sizes(doing, sizes)
        padded = torch.frombuffer(bytearray(message.ljust(max(sizes))), dtype=torch.uint8)
        parts = self._gather_tensors(doing, padded)
        messages = [part.numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]
        return self.decode_all(doing, messages, value)

    def check_sizes(self, doing: str, sizes: Sequence[int], limit: int = MOST_BYTES) -> None:
        """Refuse sizes of messages, as ranks told them, that no such message has.

        Raises:
            RankFailedError: Names the rank.
        """
        for index, size in enumerate(sizes):
            if not 0 <= size <= limit:
                raise self.unreadable(doing, index, f"it is said to have {size} bytes")

    def decode_all(self, doing: str, messages: Sequence[bytes], own: T) -> list[T]:
        """The values in the messages of all ranks, of the type of this rank's value; anyone may have None.

        Raises:
            RankFailedError: A message cannot be read, or holds something else.
        """
        values: list[T] = []
        for index, message in enumerate(messages):
            try:
                value = decode_value(message)
            except ValueError as error:
                raise self.unreadable(doing, index, error) from error
            if type(value) is not type(own) and value is not None and own is not None:
                raise self.unreadable(doing, index, f"it holds a {type(value).__name__}")
            values.append(cast(T, value))
        return values

    def wait(self, doing: str, work: dist.Work) -> None:
        """Wait for an exchange of the group to end.

        Args:
            doing: What the ranks are doing, for the message.
            work: What the exchange's start returned.

        Raises:
            RankFailedError: A rank is lost, or the exchange took longer than the timeout.
        """
        pause, next_look = _SHORTEST_PAUSE, time.monotonic() + _LOOK_SECONDS
        # Polled: a rank that does not talk to the lost one itself would wait for the timeout in silence.
        while not work.is_completed():
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                if self._others_gave_up():
                    raise self.broken(doing, "other ranks lost a connection")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.broken(doing, error) from error

    def lost(self, doing: str, index: int, reason: object) -> RankFailedError:
        """The error for one rank that is known to be lost."""
        return RankFailedError(
            f"{doing}: {self.name(index)} is lost: {one_line(reason)}. Look at the log of that rank",
            self.ranks[index],
        )

    def unreadable(self, doing: str, index: int, reason: object) -> RankFailedError:
        """The error for a message of one rank that cannot be read."""
        return RankFailedError(
            f"{doing}: {self.name(index)} sent a message that cannot be read: {one_line(reason)}. Run the "
            "same releases on all ranks, import the same modules, and let nobody else reach their network",
            self.ranks[index],
        )

    def broken(self, doing: str, reason: object) -> RankFailedError:
        """The error for an exchange that broke, naming who no longer answers.

        gloo tells only the address of a connection that broke, and only to those who use it. This rank first
        tells the others, who may wait for something else, and then all who are left answer a roll call.
        """
        seconds = min(self.timeout_seconds, _ROLL_CALL_SECONDS)
        try:
            missing = self._missing(seconds)
        except dist.DistNetworkError:
            return RankFailedError(
                f"{doing}: a connection broke, and so did that to the store of the job: the process that "
                f"holds it (rank 0, or the launcher) has ended: {one_line(reason)}",
                None,
            )
        if missing:
            named = ", ".join(self.name(index) for index in missing)
            return RankFailedError(
                f"{doing}: a connection broke, and within {seconds:g} s no answer came from {named}: "
                f"{one_line(reason)}. Look at the log of that rank",
                self.ranks[missing[0]],
            )
        return RankFailedError(
            f"{doing}: no answer within timeout_seconds={self.timeout_seconds:g}, though every rank is "
            f"alive: {one_line(reason)}. If one of them is only slow, raise timeout_seconds",
            None,
        )

    def close(self) -> None:
        """Close the connections of this rank; not collective."""
        self.process_group = None
        _open.discard(self)

    def _connect(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise DataError(
                f"{self.size} ranks need a process group, and there is none; call "
                "torch.distributed.init_process_group, or open a dist_env.DistributedEnvironment, first"
            )
        if dist.get_rank() not in self.ranks:
            raise DataError(f"rank {dist.get_rank()} is not one of the ranks that take part: {self.ranks}")
        doing = "opening the data loader"
        self.index = self.ranks.index(dist.get_rank())
        self._hosts = ["unknown host"] * self.size
        _made[self.ranks] += 1
        name = f"dataloader_dispatch/{'-'.join(map(str, self.ranks))}/{_made[self.ranks]}"
        self._store: Store = PrefixStore(name, dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            gloo = dist.ProcessGroupGloo(self.store("gloo"), self.index, self.size, timeout)
        except RuntimeError as error:
            raise self.broken(doing, error) from error
        self.process_group = cast(dist.ProcessGroup, gloo)  # a backend has the same methods
        _open.add(self)
        self._hosts = self.gather(doing, socket.gethostname())

    def _connected(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise RuntimeError("the data loader was closed; make a new one")
        return self.process_group

    def _gather_tensors(self, doing: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for _ in self.ranks]
        try:
            work = self.all_gather(received, tensor)
        except RuntimeError as error:
            raise self.broken(doing, error) from error
        self.wait(doing, work)
        return received

    def _missing(self, seconds: float) -> list[int]:
        """Positions of the ranks that do not answer a roll call, to which this one answers."""
        calls = self.store("roll call")
        calls.set(str(self.index), "")
        calls.set("called", "")
        end = time.monotonic() + seconds
        missing = list(range(self.size))
        while missing and time.monotonic() < end:
            missing = [index for index in missing if not calls.check([str(index)])]
            time.sleep(_LOOK_SECONDS / 4 if missing else 0)
        return missing

    def _others_gave_up(self) -> bool:
        try:
            return bool(self.store("roll call").check(["called"]))
        except dist.DistNetworkError:
            return True


def one_line(reason: object) -> str:
    """A reason without line breaks, with its type if it is an error."""
    text = " ".join(str(reason).split())
    if not isinstance(reason, BaseException):
        return text
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__


class Connection:
    """The connections of this rank to the others of a group.

    Args:
        group: Several ranks.
    """

    def __init__(self, group: RankGroup) -> None:
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
            raise RuntimeError("the data loader was closed")
        return self._transport


class BatchCodec:
    """Writes batches as bytes and reads them.

    What `encode_value` takes travels, and what tokenizers and processors of transformers return, without a
    fast tokenizer's own encodings.

    Args:
        unpickle: Let all other values travel as pickles, which run whatever code the sender likes; None where
            there is no such setting.
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
                f"a batch cannot be sent to other ranks: {error}. Let the collate function convert the value "
                f"or leave it out{advice}"
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
        except Exception as error:
            raise TypeError(f"a {name} does not pickle: {one_line(error)}") from error

    def _restore(self, name: str, value: object) -> object:
        if name == _PICKLE and self._unpickle and isinstance(value, bytes):
            # The one place of all packages where bytes of another process are unpickled.
            try:
                return pickle.loads(value)
            except Exception as error:
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
