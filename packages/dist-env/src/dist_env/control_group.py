"""Small messages among some ranks of a job, beside its training backend; a rank that is lost is named."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import math
import os
import socket
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from dist_env.coordination import UNKNOWN_HOST, current_coordinator
from dist_env.encoding import decode_as, encode_value
from dist_env.errors import (
    DistributedEnvironmentError,
    RankFailedError,
    RankTimeoutError,
    listed,
    one_line,
)
from dist_env.gather_tree import (
    BYTES_PER_VALUE,
    HEAD,
    LOOK_SECONDS,
    Arrival,
    Table,
    Unread,
    above,
    below,
    beside,
    merge,
    read_table,
)

T = TypeVar("T")


class Transfer(Protocol):
    """An exchange under way, such as the ``Work`` of torch that its start returned."""

    def is_completed(self) -> bool:
        """Whether waiting for it returns at once, or raises."""

    def wait(self) -> object:
        """Wait for its end; a RuntimeError tells that it failed."""


_SHORT = 1024
"""Bytes of a message that travels in one exchange with its size."""
_LIVENESS_SECONDS = 5.0
"""How long the ranks are asked who is still there, after a connection between them broke."""
_SHORTEST_PAUSE = 2e-5
_LONGEST_PAUSE = 1e-3

_MOST_CONNECTED = 128
"""Ranks of a group in which each connects to all."""
_MOMENT = timedelta(milliseconds=1)
_SETTLE_SECONDS = 1.0
"""How long closing waits for exchanges under way, to end by themselves and then because they are broken."""
_END_TAG = 7
_PROBE_TAG = 8
_GATHER_TAG = 9

_open: weakref.WeakSet[ControlGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A connection that outlives the interpreter can abort the process."""
    for group in list(_open):
        group.close()


def _keep_in_child() -> None:
    """A forked child must not destroy a group: that would wait for threads that a fork does not copy.

    Nor may it close one: the connections, and what gloo watches them with, are also those of its parent.
    """
    for group in list(_open):
        if group.process_group is not None:
            group._keep(group.process_group)
            group.process_group = None
    _open.clear()


os.register_at_fork(after_in_child=_keep_in_child)


class ControlGroup:
    """Connections of their own among some ranks, over gloo: beside any training backend, from any thread.

    A rank whose connections break while others wait for it is named within seconds, however long the timeout
    is: then all ranks that wait answer a liveness check in the job's store. `torch.distributed` does not know
    the group. Making it is collective among its ranks, which first meet in the store: until then a rank that
    is lost without a word is missed only after the timeout. Among more than 128 ranks each connects to a
    few others, and to further ones when the two have something to say to one another. With one rank nothing
    is opened.

    Args:
        ranks: Global ranks that take part, this one among them, the same on each of them.
        timeout_seconds: How long an exchange of the group may take.
        doing: What the ranks are doing when they make it, for messages; groups of one kind say the same.

    Attributes:
        ranks: The global ranks.
        index: Position of this rank among them.
        process_group: The connections; None with one rank, and once it is closed.
        scope: Name of the group, the same on its ranks, which no other group of the job has.

    Raises:
        DistributedEnvironmentError: `timeout_seconds` is not a positive number, or `ranks` is empty; or there
            are several ranks, and no default process group or this rank is not one of them.
        RankFailedError: A rank did not take part; named where it can be told.
    """

    _is_torn = False  # an exchange has failed, or was left under way

    def __init__(
        self, ranks: Sequence[int], timeout_seconds: float, *, doing: str = "opening the control group"
    ) -> None:
        is_number = isinstance(timeout_seconds, int | float)  # a file or a command line may give text
        if not (is_number and timeout_seconds > 0 and math.isfinite(timeout_seconds)):
            raise DistributedEnvironmentError(
                f"timeout_seconds={timeout_seconds!r} must be a positive, finite number, such as 60."
            )
        self.ranks: tuple[int, ...] = tuple(ranks)
        if not self.ranks:
            raise DistributedEnvironmentError("ranks is empty. Name the global ranks that take part.")
        self._collectives: list[dist.Work] = []  # perhaps under way; the group cannot end before them
        self._unanswered = torch.zeros(1, dtype=torch.uint8)
        self.timeout_seconds = timeout_seconds
        self.process_group: dist.ProcessGroup | None = None
        self.index = 0
        self.scope = ""
        self._hosts: dict[int, str] = {}
        if len(self.ranks) > 1:
            self._connect(doing)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def host(self, index: int) -> str:
        """Host of one of the ranks; `"unknown host"` once the store of the job is gone."""
        if self.size == 1:
            return socket.gethostname()
        if index not in self._hosts:
            try:
                self._hosts[index] = self._coordinator.host_of(self.ranks[index])
            except dist.DistNetworkError:
                return UNKNOWN_HOST
        return self._hosts[index]

    def name(self, index: int) -> str:
        """Rank and host of one of the ranks, for messages."""
        return f"rank {self.ranks[index]} ({self.host(index)})"

    def store(self, name: str) -> Store:
        """The job's store, under keys that no other group and no other name shares."""
        return PrefixStore(name, self._store)

    def all_reduce_max(self, tensor: torch.Tensor) -> dist.Work:
        """Start to replace each element by the largest of all ranks; a CPU tensor."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._begun(self._connected().allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start to replace a CPU tensor by that of the rank at position ``source``."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begun(self._connected().broadcast([tensor], options))

    def gather(self, doing: str, value: T, *, most_bytes: int = 1 << 24) -> list[T]:
        """The values of all ranks, in their order. Collective.

        The ranks form a binomial tree, in which values go up and all of them come down. Of equal values one
        travels, with the ranks that have it: what all ranks agree on costs no more among many of them.

        Args:
            doing: What the ranks are doing, for the message.
            value: Something short that `encode_value` takes, of the same type on every rank; any may have
                None.
            most_bytes: Longer messages of other ranks are refused.

        Returns:
            The values; equal ones may be one object.

        Raises:
            RankFailedError: A rank is lost, or its message cannot be read.
        """
        if self.size == 1:
            return [value]
        own = encode_value(value)
        table: Table | Unread = {own: [self.index, self.index + 1]}
        arrivals = [
            (child, end, self._receive(doing, child, _SHORT)) for child, end in below(self.index, self.size)
        ]
        for child, end, arrival in arrivals:
            theirs = self._received(doing, child, end, arrival, most_bytes)
            if isinstance(table, dict) and isinstance(theirs, dict):
                merge(table, theirs)
            elif isinstance(table, dict):
                table = theirs  # the first that is found; the others are received, so that none is left over
        message = encode_value(table)
        sends = [] if self.index == 0 else self._send(doing, above(self.index), message)
        table = read_table(self._from_first(doing, message, most_bytes), range(self.size), most_bytes)
        del sends  # whoever got them has answered
        if isinstance(table, tuple):
            raise self.unreadable(doing, *table)
        values: list[T] = [value] * self.size
        for each, ends in table.items():
            given = self._decoded(doing, ends[0], each, value)
            for begin, end in zip(ends[::2], ends[1::2], strict=True):
                values[begin:end] = [given] * (end - begin)
        return values

    @property
    def is_mesh(self) -> bool:
        """Whether each rank is connected to all: up to 128 are."""
        return self.size <= _MOST_CONNECTED

    def largest(self, doing: str, values: bytes) -> bytes:
        """The largest byte of all ranks at each place. Collective.

        The ranks form the tree of `gather`: 2 log2 N messages of N ranks follow one another. Those of
        `all_reduce_max`, which continues while the ranks do something else, are 2 (N - 1).

        Args:
            doing: What the ranks are doing, for the message.
            values: As many on each rank.

        Raises:
            RankFailedError: A rank is lost.
        """
        if self.size == 1:
            return values
        most = torch.tensor([1, *values], dtype=torch.uint8)  # what arrives is told by its first byte
        arrivals = [self._receive(doing, child, len(most)) for child, _ in below(self.index, self.size)]
        for arrival in arrivals:
            self.wait(doing, arrival)
            most = torch.maximum(most, torch.frombuffer(arrival.memory, dtype=torch.uint8))
        try:
            answer = most.clone()
            send = self._connected().send([most], above(self.index), _GATHER_TAG) if self.index else None
            work = self.broadcast(answer, 0)
        except RuntimeError as error:
            raise self._refused(doing, error) from error
        self.wait(doing, work)
        del send  # whoever got it has answered
        return bytes(answer[1:].tolist())

    def wait(self, doing: str, work: Transfer) -> None:
        """Wait for an exchange of the group to end.

        Args:
            doing: What the ranks are doing, for the message.
            work: What the exchange's start returned.

        Raises:
            RankFailedError: A rank is lost, or the exchange took longer than the timeout.
        """
        try:
            self._wait(doing, work)
        except BaseException:  # Ctrl-C, too: `close` must know, and the error continues
            self._is_torn = True
            raise
        self._collectives = [each for each in self._collectives if each is not work]

    def _wait(self, doing: str, work: Transfer) -> None:
        pause, next_look = _SHORTEST_PAUSE, time.monotonic() + LOOK_SECONDS
        # Polled: a rank that does not talk to the lost one itself would wait for the timeout in silence.
        while not work.is_completed():
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                if self._others_gave_up():
                    raise self.broken(doing, "other ranks lost a connection")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.broken(doing, error) from error

    def connect(self, doing: str, indices: Iterable[int]) -> None:
        """Connect to some ranks, each of which connects to this one at the same time.

        Only then may one of two ranks wait for the other: among more than 128 ranks the first receive holds a
        rank up until the other one sends or receives, too.

        Args:
            doing: What the ranks are doing, for the message.
            indices: Positions of the others.

        Raises:
            RankFailedError: A rank is lost.
        """
        if self.is_mesh:
            return
        # In one order of all pairs, so that no ranks wait for one another in a circle.
        for index in sorted(set(indices) - {self.index}, key=lambda other: sorted((self.index, other))):
            if (fault := self.fault(index)) is not None:
                raise self.broken(doing, fault)

    def fault(self, index: int) -> RuntimeError | None:
        """What is wrong with the connection to a rank."""
        try:
            # A broken connection refuses to post. What is received here is never sent.
            self._connected().recv([self._unanswered], index, _PROBE_TAG)
        except RuntimeError as error:
            return error
        return None

    def lost(self, doing: str, index: int, reason: object) -> RankFailedError:
        """The error for one rank that is known to be lost."""
        return RankFailedError(
            f"{doing}: {self.name(index)} is lost: {one_line(reason)}. Look at the log of that rank.",
            self.ranks[index],
        )

    def unreadable(self, doing: str, index: int, reason: object) -> RankFailedError:
        """The error for a message of one rank that cannot be read."""
        return RankFailedError(
            f"{doing}: {self.name(index)} sent a message that cannot be read: {one_line(reason)}. Run the "
            "same releases on all ranks, import the same modules, and let nobody else reach their network.",
            self.ranks[index],
        )

    def broken(self, doing: str, reason: object) -> RankFailedError:
        """The error for an exchange that broke, naming who failed or no longer answers.

        gloo tells only the address of a connection that broke, and only to those who use it. This rank first
        tells the others, who may wait for something else, and then all who are left answer a liveness check.
        """
        seconds = min(self.timeout_seconds, _LIVENESS_SECONDS)
        try:
            missing = self._missing(seconds)
        except RankFailedError as failure:
            return RankFailedError(f"{doing}: a connection broke, and {failure}", failure.rank)
        except dist.DistNetworkError:
            return RankFailedError(
                f"{doing}: a connection broke, and so did that to the store of the job: the process that "
                f"holds it (rank 0, or the launcher) has ended: {one_line(reason)}.",
                None,
            )
        if missing:
            named = listed(self.name(index) for index in missing)
            return RankFailedError(
                f"{doing}: a connection broke, and within {seconds:g} s no answer came from {named}: "
                f"{one_line(reason)}. Look at the log of that rank.",
                self.ranks[missing[0]],
            )
        return RankFailedError(
            f"{doing}: an exchange failed, though every rank is alive: {one_line(reason)}. If it timed out, "
            f"a rank was only late, and more than timeout_seconds={self.timeout_seconds:g} helps. If not, "
            "look at the network between the hosts.",
            None,
        )

    def close(self) -> None:
        """Close the connections of this rank; not collective."""
        group, self.process_group = self.process_group, None
        _open.discard(self)
        if group is None:
            return
        try:
            # To close while others still send breaks their connections.
            if self._is_torn or not self._has_settled(_SETTLE_SECONDS):
                _break_connections(group, [each for each in self._neighbors() if each != self.index])
                self._has_settled(_SETTLE_SECONDS)
        finally:  # after Ctrl-C, too
            if not self._has_settled(0.0):
                # A send that finds its connection reset may be forgotten by gloo, which waits for it until
                # the timeout. So the group outlives this rank's part in it, with all that the exchange uses.
                self._keep(group)

    def __del__(self) -> None:
        """One that is dropped behind Ctrl-C in an exchange would wait for the exchange until the timeout."""
        if self._is_torn and self.process_group is not None:
            self.close()

    def _keep(self, group: dist.ProcessGroup) -> None:
        """Have the connections, and the exchanges under way, outlive the modules, too."""
        self._kept = group
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # never given back

    def _begun(self, collective: dist.Work) -> dist.Work:
        """Keep in mind a collective that has begun."""
        self._collectives = [each for each in self._collectives if not each.is_completed()] + [collective]
        return collective

    def _has_settled(self, seconds: float) -> bool:
        """Whether all collectives that have begun end within so many seconds."""
        end = time.monotonic() + seconds
        while not (settled := all(each.is_completed() for each in self._collectives)):
            if time.monotonic() >= end:
                break
            time.sleep(_LONGEST_PAUSE)
        return settled

    def _neighbors(self) -> Iterable[int]:
        return range(self.size) if self.is_mesh else beside(self.index, self.size)

    def _connect(self, doing: str) -> None:
        world = dist.group.WORLD if dist.is_available() else None
        if world is None:
            raise DistributedEnvironmentError(
                f"{self.size} ranks need a process group, and there is none. Call "
                "torch.distributed.init_process_group, or open a dist_env.DistributedEnvironment, first."
            )
        if dist.get_rank() not in self.ranks:
            raise DistributedEnvironmentError(
                f"rank {dist.get_rank()} is not one of the ranks that take part: {self.ranks}."
            )
        self.index = self.ranks.index(dist.get_rank())
        try:
            self._meet(doing, world.get_group_store())
        except RankTimeoutError as error:
            named = listed(f"rank {rank} ({host})" for rank, host in sorted(error.missing.items()))
            raise RankFailedError(
                f"{doing}: within timeout_seconds={self.timeout_seconds:g} no answer came from {named}. "
                "Look at the log of that rank.",
                min(error.missing, default=None),
            ) from error
        except RankFailedError as error:
            raise RankFailedError(f"{doing}: {error}", error.rank) from error
        except dist.DistError as error:
            raise RankFailedError(
                f"{doing}: the store of the job is gone: {one_line(error)}.", None
            ) from error
        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            gloo = _open_gloo(self.store("gloo"), self.index, self.size, timeout)
        except RuntimeError as error:
            raise self.broken(doing, error) from error
        # A backend has the same methods, which torch does not declare.
        self.process_group = cast(dist.ProcessGroup, gloo)
        _open.add(self)
        self.connect(doing, self._neighbors())
        self.host(0)  # known also where rank 0, which may hold the store, is lost

    def _meet(self, doing: str, store: Store) -> None:
        """Wait for the other ranks, and name the group.

        gloo's own start holds the connection of this process to the store until all have come, from which
        what the others do first, such as a save in the background, may have to hear.
        """
        self._coordinator = current_coordinator()
        named = f"{doing}/{_named(self.ranks)}"
        # The store counts, for each place: a process may have been another rank of an earlier default group.
        number = store.add(f"dist_env/control groups/{named}/{self.index}", 1)
        self.scope = f"{named}/{number}"
        self._store: Store = PrefixStore(f"dist_env/control/{self.scope}", store)
        self._coordinator.barrier(self.ranks, self.scope, self.timeout_seconds, doing)

    def _connected(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise RuntimeError("the control group was closed. Make a new one.")
        return self.process_group

    def _send(self, doing: str, index: int, message: bytes) -> list[tuple[dist.Work, torch.Tensor]]:
        """Start to send a message; what is returned has to be kept until it was received."""
        head = len(message).to_bytes(HEAD, "big") + message[: _SHORT - HEAD]
        pieces = [head.ljust(_SHORT, b"\0"), message[_SHORT - HEAD :]]
        tensors = [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces if piece]
        try:
            return [(self._connected().send([each], index, _GATHER_TAG), each) for each in tensors]
        except RuntimeError as error:
            raise self._refused(doing, error) from error

    def _receive(self, doing: str, index: int, size: int) -> Arrival:
        """Begin to receive so many bytes from a rank."""
        memory = bytearray(size)
        try:
            work = self._connected().recv([torch.frombuffer(memory, dtype=torch.uint8)], index, _GATHER_TAG)
        except RuntimeError as error:
            raise self._refused(doing, error) from error
        return Arrival(self, index, work, memory)

    def _received(
        self, doing: str, child: int, end: int, arrival: Arrival, most_bytes: int
    ) -> Table | Unread:
        """What the ranks from a child to before ``end`` have."""
        self.wait(doing, arrival)
        head = bytes(arrival.memory)
        size, most = int.from_bytes(head[:HEAD], "big"), (end - child) * (most_bytes + BYTES_PER_VALUE)
        if size > max(most, _SHORT):
            return child, f"it is said to have {size} bytes"
        message = head[HEAD : HEAD + size]
        if size > len(message):
            arrival = self._receive(doing, child, size - len(message))
            arrival.has_begun = True  # it follows at once
            self.wait(doing, arrival)
            message += arrival.memory
        return read_table(message, range(child, end), most_bytes)

    def _refused(self, doing: str, error: RuntimeError) -> RuntimeError:
        """The error for a transfer that could not even begin."""
        return error if self.process_group is None else self.broken(doing, error)

    def _from_first(self, doing: str, message: bytes, most_bytes: int) -> bytes:
        """The message of the first rank, on every rank."""
        head = len(message).to_bytes(HEAD, "big") + message[: _SHORT - HEAD]
        memory = bytearray(head.ljust(_SHORT, b"\0"))
        self._broadcast(doing, memory)
        size = int.from_bytes(memory[:HEAD], "big")
        if size > max(self.size * (most_bytes + BYTES_PER_VALUE), _SHORT):
            raise self.unreadable(doing, 0, f"it is said to have {size} bytes")
        short = bytes(memory[HEAD : HEAD + size])
        if size == len(short):
            return short
        rest = bytearray(message[len(short) :]) if self.index == 0 else bytearray(size - len(short))
        self._broadcast(doing, rest)
        return short + rest

    def _broadcast(self, doing: str, memory: bytearray) -> None:
        try:
            work = self.broadcast(torch.frombuffer(memory, dtype=torch.uint8), 0)
        except RuntimeError as error:
            raise self._refused(doing, error) from error
        self.wait(doing, work)

    def _decoded(self, doing: str, index: int, message: bytes, own: T) -> T:
        try:
            value = decode_as(own, message)
        except ValueError as error:
            raise self.unreadable(doing, index, error) from error
        if type(value) is not type(own) and value is not None and own is not None:
            raise self.unreadable(doing, index, f"it holds a {type(value).__name__}")
        return value

    def _missing(self, seconds: float) -> list[int]:
        """Positions of the ranks that do not answer a liveness check, to which this one answers."""
        answers = self.store("liveness")
        answers.set(str(self.index), "")
        answers.set("asked", "")
        end = time.monotonic() + seconds
        missing = list(range(self.size))
        while missing and time.monotonic() < end:
            missing = [index for index in missing if not answers.check([str(index)])]
            # A rank that failed closes its connections before it says why.
            self._coordinator.raise_if_failed()
            time.sleep(LOOK_SECONDS / 4 if missing else 0)
        return missing

    def _others_gave_up(self) -> bool:
        try:
            return bool(self.store("liveness").check(["asked"]))
        except dist.DistNetworkError:
            return True


def _named(ranks: Sequence[int]) -> str:
    """A short name for these ranks, in this order: it is part of every key in the store."""
    if len(ranks) <= 8:
        return "-".join(map(str, ranks))
    return f"{len(ranks)} ranks {hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:32]}"


def _break_connections(group: dist.ProcessGroup, indices: Iterable[int]) -> None:
    """End the exchanges of a group that nobody waits for any more, and would hold it until its timeout.

    gloo closes all connections where a receive times out, and has no other way. A receive from a rank whose
    connection is broken already fails at once and closes none: so each is tried.
    """
    for index in indices:
        with suppress(RuntimeError):
            group.recv([torch.zeros(1, dtype=torch.uint8)], index, _END_TAG).wait(_MOMENT)


def _open_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A group of gloo, in which two of many ranks connect when they first meet.

    Otherwise each rank connects to every other one while the group is made, and reads 8 bytes for each pair
    of ranks from the store: 2 GB a rank among 16,384.
    """
    if size <= _MOST_CONNECTED:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    # Private in torch 2.11 to 2.13: `_Options` and its fields. TORCH_GLOO_LAZY_INIT would do that for all
    # groups of the process. test_control_group.py counts the connections.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    return dist.ProcessGroupGloo(store, rank, size, options)
