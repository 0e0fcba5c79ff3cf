"""What ranks tell one another through the store, beside the collective backend.

A collective that waits for a missing rank can only say that it waits. The store also answers who arrived.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import distributed as dist

from dist_env.errors import (
    DistributedEnvironmentError,
    RankFailedError,
    RankTimeoutError,
    listed,
    one_line,
)
from dist_env.flight_recorder import dump_trace
from dist_env.interface import DistributedEnvInterface, StaticDistributedEnvironment

if TYPE_CHECKING:
    # Builds of torch without torch.distributed have no stores.
    from torch._C._distributed_c10d import Store

UNKNOWN_HOST = "unknown host"


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One process in its place. `token` tells it from any other process that ever had this rank."""

    rank: int
    host: str
    pid: int
    token: str
    world_size: int
    device: str
    device_identity: str | None
    backend: str | None

    @classmethod
    def of(cls, env: DistributedEnvInterface, *, device_identity: str | None = None) -> RankRecord:
        """The record of this process, with a new token."""
        return cls(
            rank=env.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=secrets.token_hex(8),
            world_size=env.world_size,
            device=str(env.device),
            device_identity=device_identity,
            backend=env.backend,
        )

    def to_text(self) -> str:
        """The record for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> RankRecord:
        """The record from the store."""
        return cls(**json.loads(text))


class Coordinator:
    """Barriers, outcomes and failure notes among ranks that have met.

    Args:
        store: Store that every rank can reach, with a prefix of its own.
        record: This rank's record.

    Attributes:
        holder: Rank whose process holds the store; None if the launcher does, or if that is not known.
    """

    def __init__(self, store: Store, record: RankRecord) -> None:
        self.holder: int | None = None
        self.store = store
        self.record = record
        self.world_size = record.world_size
        self._calls: Counter[str] = Counter()
        self._passed: set[str] = set()

    def publish(self) -> None:
        """Let the others know this rank's host."""
        self.store.set(f"rank/{self.record.rank}", self.record.to_text())

    def host_of(self, rank: int) -> str:
        """The rank's host, or `"unknown host"`."""
        key = f"rank/{rank}"
        if not self.store.check([key]):
            return UNKNOWN_HOST
        return RankRecord.from_text(self.store.get(key)).host

    def fail(self, error: BaseException) -> None:
        """Note that this rank failed. The first note stays, so that the others name the cause."""
        note = {"rank": self.record.rank, "host": self.record.host, "error": one_line(error)}
        if self.store.add("failures", 1) == 1:
            self.store.set("failure", json.dumps(note))

    def failure_of_another(self) -> RankFailedError | None:
        """The failure that another rank has noted: that rank, its host and its error."""
        if not self.store.check(["failure"]):
            return None
        note = json.loads(self.store.get("failure"))
        if note["rank"] == self.record.rank:
            return None
        return RankFailedError(
            f"rank {note['rank']} on {note['host']} failed: {note['error']}.", note["rank"]
        )

    def raise_if_failed(self) -> None:
        """Raise if another rank has noted a failure.

        Raises:
            RankFailedError: With the other rank, its host and its error.
        """
        failure = self.failure_of_another()
        if failure is not None:
            raise failure

    def barrier(
        self,
        ranks: Sequence[int],
        scope: str,
        timeout: float,
        tag: str,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all of `ranks` have called this as often as this rank has for `scope`.

        Args:
            ranks: Global ranks.
            scope: Name of the group of these ranks.
            timeout: Seconds to wait.
            tag: What is waited for.
            look: Called now and then during the wait; may raise what ends it.

        Raises:
            RankTimeoutError: Ranks are missing; names them and their hosts.
            RankFailedError: A rank failed, so that it will never arrive.
        """
        count = self.next_call(f"barrier/{scope}")
        here, before = f"barrier/{scope}/{count}", f"barrier/{scope}/{count - 1}"

        def missing() -> RankTimeoutError | None:
            late = [rank for rank in ranks if not self.store.check([f"{here}/{rank}"])]
            if late and not self.store.check([f"{here}/done"]):
                what = f"barrier{f' {tag!r}' if tag else ''}: timeout={timeout:g} s"
                return self._late(late, len(ranks), what)
            # The last one came, or has left, while this rank looked; or it died before it could say so.
            self.store.set(f"{here}/done", "1")
            return None

        with self._connected():
            self.store.set(f"{here}/{self.record.rank}", tag)
            if scope in self._passed:
                # Only after a barrier that held; others may still look who came to one that did not.
                self._passed.discard(scope)
                self.store.delete_key(f"{before}/{self.record.rank}")
            if self.store.add(f"{here}/arrivals", 1) < len(ranks):
                self._await(lambda: self.store.check([f"{here}/done"]), timeout, missing, look)
            else:
                self.store.set(f"{here}/done", "1")
                # Everybody has arrived here, so nobody is in the one before.
                self.store.delete_key(f"{before}/arrivals")
                self.store.delete_key(f"{before}/done")
            self._passed.add(scope)

    def announce(self, key: str, error: BaseException | None) -> None:
        """Publish the outcome of something that other ranks wait for with `await_outcome`."""
        note = {
            "rank": self.record.rank,
            "host": self.record.host,
            "error": one_line(error) if error else None,
        }
        with self._connected():
            self.store.set(key, json.dumps(note))

    def await_outcome(self, key: str, main: int, timeout: float, readers: int) -> None:
        """Wait for `announce` on rank `main`; the last of `readers` clears the key.

        Raises:
            RankTimeoutError: `main` did not get there in time.
            RankFailedError: `main` announced a failure, or some rank failed.
        """

        def missing() -> RankTimeoutError:
            return self._late([main], self.world_size, f"main_process_first: timeout={timeout:g} s")

        with self._connected():
            self._await(lambda: self.store.check([key]), timeout, missing)
            note = json.loads(self.store.get(key))
            if self.store.add(f"{key}/readers", 1) == readers:
                self.store.delete_key(key)
                self.store.delete_key(f"{key}/readers")
        if note["error"] is not None:
            raise RankFailedError(
                f"rank {note['rank']} on {note['host']} failed while others waited for it: {note['error']}.",
                note["rank"],
            )

    def wait_for(self, key: str, rank: int, timeout: float, doing: str) -> bytes:
        """The value that a rank is going to set.

        Raises:
            RankTimeoutError: It did not get there in time.
            RankFailedError: A rank failed.
        """
        with self._connected():
            self._await(
                lambda: self.store.check([key]),
                timeout,
                lambda: self._late([rank], self.world_size, f"{doing}: timeout={timeout:g} s"),
            )
            return self.store.get(key)

    def next_call(self, scope: str) -> int:
        """How often this was called for `scope` before, counted alike on every rank."""
        self._calls[scope] += 1
        return self._calls[scope] - 1

    def leave(self, timeout: float) -> list[int]:
        """Sign off. The holder of the store waits for the others, which still need it.

        Returns:
            The ranks that had not signed off after `timeout` seconds.
        """
        self.store.set(f"left/{self.record.rank}", "1")
        if self.store.add("left", 1) >= self.world_size or timeout <= 0:
            return []
        try:
            self._await(lambda: self.store.add("left", 0) >= self.world_size, timeout, _StillHere)
        except (_StillHere, RankFailedError):
            return [rank for rank in range(self.world_size) if not self.store.check([f"left/{rank}"])]
        return []

    def clone(self) -> Coordinator:
        """The same with a connection of its own, for another thread."""
        return Coordinator(self.store.clone(), self.record)  # type: ignore[attr-defined]  # undeclared

    def _late(self, late: list[int], total: int, what: str) -> RankTimeoutError:
        hosts = {rank: self.host_of(rank) for rank in late}
        named = listed(f"rank {rank} ({host})" for rank, host in hosts.items())
        return RankTimeoutError(
            f"{what} passed on rank {self.record.rank} on {self.record.host}; "
            f"{len(late)} of {total} ranks did not arrive: {named}.",
            hosts,
        )

    def _await(
        self,
        arrived: Callable[[], bool],
        timeout: float,
        missing: Callable[[], RankTimeoutError | _StillHere | None],
        look: Callable[[], None] | None = None,
    ) -> None:
        # Polled, because a blocking wait on a store holds its connection and logs every timeout.
        deadline = time.monotonic() + timeout
        pause, next_look = 0.0005, time.monotonic() + 0.2
        while not arrived():
            now = time.monotonic()
            if now >= next_look:
                self.raise_if_failed()
                if look is not None:
                    look()
                next_look = now + 0.2
            if now >= deadline and (error := missing()) is not None:
                if isinstance(error, RankTimeoutError):
                    dump_trace(str(error))
                raise error
            time.sleep(pause)
            pause = min(pause * 1.3, 0.05)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError:
            raise lost_store(self.record) from None


def lost_store(record: RankRecord) -> RankFailedError:
    """The error of a rank whose connection to the store broke."""
    return RankFailedError(
        f"rank {record.rank} on {record.host} lost the store of the job: the process that holds it (rank 0, "
        "or the launcher) has ended.",
        None,
    )


def prefix_store(prefix: str, store: Store) -> Store:
    """The same store, seen through a prefix of its keys."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # torch does not declare it


def coordinator_of(env: DistributedEnvInterface) -> Coordinator:
    """The coordinator of an opened environment, else one over the store of the existing default group.

    Raises:
        DistributedEnvironmentError: There is no process group.
    """
    own = getattr(env, "coordinator", None)
    if isinstance(own, Coordinator):
        return own
    if not (dist.is_available() and dist.is_initialized()):
        raise no_process_group(env)
    return current_coordinator()


def no_process_group(env: DistributedEnvInterface) -> DistributedEnvironmentError:
    """The error of several ranks that nothing connects."""
    return DistributedEnvironmentError(
        f"WORLD_SIZE={env.world_size} needs a process group, and there is none. Open a "
        "DistributedEnvironment first (`with DistributedEnvironment() as env:`)."
    )


class _Shared:
    """The coordinator of the default group, kept as long as that group is the default one."""

    current: tuple[dist.ProcessGroup, Coordinator] | None = None


_shared = _Shared()


def use_coordinator(coordinator: Coordinator) -> None:
    """Let all of this process share the coordinator of those who formed the default group."""
    if dist.group.WORLD is not None:
        _shared.current = (dist.group.WORLD, coordinator)


def current_coordinator() -> Coordinator:
    """The coordinator of the default group, the same for every caller: who formed it, or else over its store.

    Raises:
        RuntimeError: No default group exists.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no default process group.")
    current = _shared.current
    if current is None or current[0] is not group:
        store = prefix_store("dist_env/shared", group.get_group_store())
        rank, size = dist.get_rank(), dist.get_world_size()
        place = StaticDistributedEnvironment(
            rank=rank, local_rank=rank, world_size=size, local_world_size=size, backend=dist.get_backend()
        )
        current = _shared.current = (group, Coordinator(store, RankRecord.of(place)))
        current[1].publish()
    return current[1]


def forget_coordinator() -> Coordinator | None:
    """Let go of the default group, which is about to be destroyed; returns its coordinator, if any."""
    current, _shared.current = _shared.current, None
    return None if current is None else current[1]


class _StillHere(Exception):
    """Ends a wait whose outcome is not an error."""
