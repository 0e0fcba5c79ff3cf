"""Ranks that exchange messages about their data, and the words for one that is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dataloader_dispatch.errors import DataError
from dist_env import RankFailedError, RankTimeoutError, StaticDistributedEnvironment, barrier

T = TypeVar("T")

_ROLL_CALL_SECONDS = 5.0
"""How long the ranks are asked who is still there, after a connection between them broke."""
_LOOK_SECONDS = 0.2
_SHORTEST_PAUSE = 2e-5
_LONGEST_PAUSE = 1e-3
_BROKEN = "broken"


class RankGroup:
    """A gloo group of its own among some ranks: it works beside any training backend, from any thread.

    Making it is collective among its ranks. With one rank nothing is opened.

    Args:
        ranks: Global ranks that take part, this one among them; the first is the root.
        timeout_seconds: How long a collective of the group may take.

    Attributes:
        ranks: The global ranks.
        index: Position of this rank among them.
        process_group: The group; None with one rank.

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
            self._open()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def name(self, index: int) -> str:
        """Rank and host of one of the ranks, for messages."""
        return f"rank {self.ranks[index]} ({self._hosts[index]})"

    def gather(self, doing: str, value: T) -> list[T]:
        """The values of all ranks, in their order. Collective.

        Args:
            doing: What the ranks are doing, for the message.
            value: Anything that pickles.

        Raises:
            RankFailedError: A rank is lost.
        """
        if self.process_group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.process_group)
        except RuntimeError as error:
            raise self.broken(doing, error) from error
        return values  # type: ignore[return-value]  # every entry was filled

    def wait(self, doing: str, work: dist.Work) -> None:
        """Wait for a collective of the group that was started with ``async_op=True``.

        Args:
            doing: What the ranks are doing, for the message.
            work: What the collective returned.

        Raises:
            RankFailedError: A rank is lost, or the collective took longer than the timeout.
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

    def broken(self, doing: str, reason: object) -> RankFailedError:
        """The error for a collective that broke, naming who no longer answers.

        gloo tells only the address of a connection that broke, and only to those who use it. This rank first
        tells the others, who may wait for something else, and then all who are left answer a roll call.
        """
        if not dist.is_initialized():
            return RankFailedError(f"{doing}: the process group was destroyed: {one_line(reason)}", None)
        env = StaticDistributedEnvironment(
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
        )
        seconds = min(self.timeout_seconds, _ROLL_CALL_SECONDS)
        try:
            self._store.set(_BROKEN, "")
            barrier(env, timeout=seconds, process_group=self.process_group, tag=f"{doing}: roll call")
        except RankTimeoutError as error:
            known = [self.name(index) for index, rank in enumerate(self.ranks) if rank in error.missing]
            named = ", ".join(known) or ", ".join(f"rank {rank}" for rank in sorted(error.missing))
            return RankFailedError(
                f"{doing}: a connection broke, and within {seconds:g} s no answer came from {named}: "
                f"{one_line(reason)}. Look at the log of that rank",
                min(error.missing),
            )
        except RankFailedError as error:
            return RankFailedError(f"{doing}: {error}", error.rank)
        except dist.DistNetworkError:
            return RankFailedError(
                f"{doing}: a connection broke, and so did that to the store of the job: the process that "
                f"holds it (rank 0, or the launcher) has ended: {one_line(reason)}",
                None,
            )
        return RankFailedError(
            f"{doing}: no answer within timeout_seconds={self.timeout_seconds:g}, though every rank is "
            f"alive: {one_line(reason)}. If one of them is only slow, raise timeout_seconds",
            None,
        )

    def close(self) -> None:
        """Close the connections of this rank; not collective."""
        group, self.process_group = self.process_group, None
        if group is not None and dist.is_initialized() and dist.group.WORLD is self._default:
            dist.destroy_process_group(group)

    def _others_gave_up(self) -> bool:
        try:
            return bool(self._store.check([_BROKEN]))
        except dist.DistNetworkError:
            return True

    def _open(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise DataError(
                f"{self.size} ranks need a process group, and there is none; call "
                "torch.distributed.init_process_group, or open a dist_env.DistributedEnvironment, first"
            )
        if dist.get_rank() not in self.ranks:
            raise DataError(f"rank {dist.get_rank()} is not one of the ranks that take part: {self.ranks}")
        self.index = self.ranks.index(dist.get_rank())
        self._default = dist.group.WORLD
        self.process_group = dist.new_group(
            list(self.ranks),
            timeout=timedelta(seconds=self.timeout_seconds),
            backend="gloo",
            use_local_synchronization=True,
        )
        name = self.process_group.group_name
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # it is initialized
        self._store = PrefixStore(f"dataloader_dispatch/{name}", store)
        self._hosts = self.gather("opening the data loader", self._hosts[0])


def one_line(reason: object) -> str:
    """A reason without line breaks, with its type if it is an error."""
    text = " ".join(str(reason).split())
    if not isinstance(reason, BaseException):
        return text
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__
