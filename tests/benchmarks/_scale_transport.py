"""Many ranks in one process, whose messages are counted: over real stores and gloo, or over memory.

Each rank is a thread with a default process group of its own, as `torch.distributed` knows it, so that the
control code of the packages runs unchanged. Both transports have the same counters in the same places: at
each request to the store, each exchange of a group, and each message of a TCP connection between hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import _scale_memory
import torch
import torch.distributed as dist
from _scale_counts import Counts, RankSlot, here, own_slot
from _scale_memory import MemoryGroup, forget_groups

from dataloader_dispatch.dispatch import receiver
from dist_env import control_group, coordination, handshake, tree_sums
from dist_env.coordination import RankRecord
from dist_env.interface import StaticDistributedEnvironment

_MOMENT_SECONDS = 0.05
_STACK_BYTES = 512 * 1024


class _World:
    """Stands in for what `torch.distributed` knows of a process, so that each rank's thread has its own.

    Private in torch 2.13: `distributed_c10d._world`, which its own tests replace in the same way.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(own_slot().world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(own_slot().world, name, value)


class _SharedOfRank:
    """Stands in for the coordinator that a process shares."""

    @property
    def current(self) -> Any:
        return own_slot().coordinator

    @current.setter
    def current(self, value: Any) -> None:
        own_slot().coordinator = value


class CountingStore(dist.Store):  # type: ignore[misc]
    """A store whose requests are counted for the rank that makes them.

    Args:
        inner: Where the keys are.
        slot: The rank.
    """

    def __init__(self, inner: Any, slot: RankSlot) -> None:
        super().__init__()
        self._inner = inner
        self._slot = slot
        slot.held.append(self)  # what C++ holds of a store does not keep its Python part

    def _count(self, num_bytes: int, *, is_poll: bool = False) -> None:
        if self._slot.is_paused:
            return
        if is_poll:
            self._slot.counts.polls += 1
            self._slot.counts.poll_bytes += num_bytes
        else:
            self._slot.counts.request(num_bytes)

    def set(self, key: str, value: Any) -> None:
        self._count(len(key) + len(value))
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._inner.get(key)
        self._count(len(key) + len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(len(key) + 16, is_poll=amount == 0)
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        there = bool(self._inner.check(keys))
        self._count(sum(map(len, keys)) + 1, is_poll=not there)
        if not there and isinstance(self._inner, dist.HashStore) and keys[0].endswith("/done"):
            # Waits a moment, as exchanges over memory do: at a barrier all of a thousand threads ask again.
            with suppress(dist.DistStoreError):
                self._inner.wait(keys, timedelta(seconds=_scale_memory.WAIT_SECONDS))
        return there

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._inner.compare_set(key, expected, desired)
        self._count(len(key) + len(expected) + len(desired) + len(value))
        return value

    def delete_key(self, key: str) -> bool:
        self._count(len(key))
        return bool(self._inner.delete_key(key))

    deleteKey = delete_key  # what C++ of torch 2.13 asks for

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._inner.multi_get(keys)
        self._count(sum(map(len, keys)) + sum(map(len, values)))
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count(sum(map(len, keys)) + sum(map(len, values)))
        self._inner.multi_set(keys, values)

    def append(self, key: str, value: Any) -> None:
        self._count(len(key) + len(value))
        self._inner.append(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count(sum(map(len, keys)))
        self._inner.wait(keys, *([] if timeout is None else [timeout]))

    def has_extended_api(self) -> bool:
        return bool(self._inner.has_extended_api())

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._inner.timeout
        return found

    def clone(self) -> CountingStore:
        return CountingStore(self._inner.clone(), self._slot)


class CountedGroup:
    """The exchanges of a group, counted as gloo sends them.

    Args:
        inner: A gloo group, or one over memory.
        index: Position of this rank.
        size: Number of ranks.
    """

    def __init__(self, inner: Any, index: int, size: int) -> None:
        self.inner = inner
        self._index = index
        self._size = size
        self._slot = own_slot()

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        self._count(allgather_traffic(self._size, inputs[0].nbytes), self._size - 1)
        return self.inner.allgather(outputs, inputs, *options)

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        self._count(allreduce_traffic(self._size, tensors[0].nbytes), 2 * (self._size - 1))
        return self.inner.allreduce(tensors, *options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        sends = broadcast_sends(self._size, (self._index - options.rootRank) % self._size)
        received = int(self._index != options.rootRank)
        self._slot.counts.add(sends + received, (sends + received) * tensors[0].nbytes, sends)
        self._slot.counts.rounds += (self._size - 1).bit_length()
        return self.inner.broadcast(tensors, options)

    def _count(self, traffic: tuple[int, int], rounds: int) -> None:
        messages, num_bytes = traffic
        # Each is sent by one rank and received by another.
        self._slot.counts.add(2 * messages / self._size, 2 * num_bytes / self._size, messages / self._size)
        self._slot.counts.rounds += rounds

    def send(self, tensors: Any, index: int, tag: int) -> Any:
        if not self._slot.is_paused:
            self._slot.counts.add(1, tensors[0].nbytes, 1)
        return self.inner.send(tensors, index, tag)

    def recv(self, tensors: Any, index: int, tag: int) -> Any:
        # Counted where it was sent: receives are posted ahead, and some are never answered.
        if tag == control_group._GATHER_TAG:
            self._slot.counts.rounds += 1  # the first rank has the longest way, and as many ranks below it
        return self.inner.recv(tensors, index, tag)


def allgather_traffic(size: int, num_bytes: int) -> tuple[int, int]:
    """Messages and bytes of all ranks in an all-gather of gloo: a ring, in halves."""
    return 2 * size * (size - 1), size * (size - 1) * num_bytes


def allreduce_traffic(size: int, num_bytes: int) -> tuple[int, int]:
    """Messages and bytes of all ranks in an all-reduce of gloo: two rounds of a ring, in pieces."""
    pieces = -(-num_bytes // -(-num_bytes // (2 * size)))
    return 2 * (size - 1) * pieces, 2 * (size - 1) * num_bytes


def broadcast_sends(size: int, position: int) -> int:
    """How many ranks one at a position behind the root sends a broadcast to: gloo's binomial tree."""
    rounds = max(size - 1, 0).bit_length()
    start = position.bit_length() if position else 0
    return sum(1 for each in range(start, rounds) if position + (1 << each) < size)


class WorldGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The default group of one rank.

    Args:
        counted: Its exchanges.
        rank: Its number.
        size: Number of ranks.
        store: The job's store.
    """

    def __init__(self, counted: CountedGroup, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)
        self._counted = counted
        self._job_store = store

    def get_group_store(self) -> Any:
        return self._job_store

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        return self._counted.allgather(outputs, inputs, *options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._counted.broadcast(tensors, options)

    def getBackendName(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> str:
        return "world"


class Job:
    """Some ranks in this process.

    Args:
        size: Number of ranks.
        is_real: Whether they talk over a TCP store and gloo; otherwise over memory.
    """

    def __init__(self, size: int, *, is_real: bool) -> None:
        self.size = size
        self.is_real = is_real
        self.slots = [RankSlot(rank) for rank in range(size)]
        self.envs: list[StaticDistributedEnvironment] = []
        self.phases: dict[str, list[Counts]] = {}
        self._inner: Any = dist.HashStore()
        if is_real:
            self._inner = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, body: Callable[[Job, int], None]) -> dict[str, list[Counts]]:
        """Run a function on the thread of every rank.

        Returns:
            What each rank sent, by phase.

        Raises:
            BaseException: What the body raised on some rank.
        """
        threading.stack_size(_STACK_BYTES)
        with _one_process_for_all(self):
            threads = [
                threading.Thread(target=self._run_rank, args=(body, rank), daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and self._failure is None:
                time.sleep(_MOMENT_SECONDS)  # after a failure the others may wait for it for ever
        if self._failure is not None:
            raise self._failure
        return self.phases

    @contextmanager
    def phase(self, name: str) -> Any:
        """Count what this rank does in the body under a name; all ranks come here."""
        slot = own_slot()
        self._barrier.wait()
        slot.counts = Counts()
        yield
        self._barrier.wait()
        with self._lock:
            self.phases.setdefault(name, [Counts()] * self.size)[slot.rank] = slot.counts

    def meet(self) -> None:
        """Wait for all ranks, uncounted."""
        self._barrier.wait()

    def open_default_group(self, rank: int) -> StaticDistributedEnvironment:
        """Find the other ranks as an environment does, and make this rank's default group."""
        store = CountingStore(self._client(), own_slot())
        env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank % 8, world_size=self.size, local_world_size=min(8, self.size)
        )
        coordinator = handshake.join(store, RankRecord.of(env), 3600.0)
        group_store = coordination.prefix_store("group", coordinator.store)
        gloo_store = coordination.prefix_store("gloo", group_store)
        counted = self.open_group(gloo_store, rank, timedelta(seconds=3600))
        group = WorldGroup(counted, rank, self.size, group_store)
        world = own_slot().world
        world.default_pg = group
        world.pg_map[group] = ("gloo", group_store)
        world.pg_names[group] = "world"
        world.pg_group_ranks[group] = {each: each for each in range(self.size)}
        world.pg_backend_config[group] = "cpu:gloo"
        coordination.use_coordinator(coordinator)
        return env

    def open_group(self, store: Any, rank: int, timeout: timedelta) -> CountedGroup:
        """A group of all ranks, in which each connects to all."""
        if self.is_real:
            return CountedGroup(dist.ProcessGroupGloo(store, rank, self.size, timeout), rank, self.size)
        return CountedGroup(MemoryGroup(store, rank, self.size, connects_to_all=True), rank, self.size)

    def _client(self) -> Any:
        if not self.is_real:
            return self._inner
        return dist.TCPStore("localhost", self._inner.port, None, False, wait_for_workers=False)

    def _run_rank(self, body: Callable[[Job, int], None], rank: int) -> None:
        here.slot = self.slots[rank]
        try:
            body(self, rank)
        except threading.BrokenBarrierError:
            return  # another rank failed first
        except BaseException as error:  # noqa: BLE001 - raised where the job was started
            self._failure = self._failure or error
            self._barrier.abort()


@contextmanager
def _one_process_for_all(job: Job) -> Any:
    """Let each thread be a rank: what is one for each process is then one for each thread of a rank."""

    def make_control_group(store: Any, index: int, size: int, timeout: timedelta) -> CountedGroup:
        if job.is_real:
            return CountedGroup(usual_open(store, index, size, timeout), index, size)
        return CountedGroup(MemoryGroup(store, index, size, connects_to_all=False), index, size)

    def start(thread: threading.Thread) -> None:
        slot = getattr(here, "slot", None)
        run = thread.run

        def run_as_rank() -> None:
            here.slot = slot
            run()

        if slot is not None:
            thread.run = run_as_rank  # type: ignore[method-assign]
        usual_start(thread)

    def counted_write(link: Any, data: bytes) -> None:
        own_slot().counts.add(1, len(data), 1)
        usual_write(link, data)

    def counted_read(link: Any, size: int) -> bytes:
        own_slot().counts.add(0, size)
        return usual_read(link, size)

    def counted_receive(link: Any, number: int, count: int) -> tuple[float, ...]:
        own_slot().counts.add(1, 0)
        return usual_receive(link, number, count)

    c10d = dist.distributed_c10d
    usual_start, usual_world, usual_shared = threading.Thread.start, c10d._world, coordination._shared
    usual_write, usual_read = tree_sums.Link._write, tree_sums.Link._read
    usual_receive = tree_sums.Link.receive
    usual_poll = handshake._POLL_SECONDS
    usual_open, usual_most = control_group._open_gloo, control_group._MOST_CONNECTED
    usual_look, usual_pause = receiver._LOOK_SECONDS, receiver._LONGEST_PAUSE
    usual_moment = _scale_memory.WAIT_SECONDS
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threading.Thread.start = start  # type: ignore[method-assign]
    c10d._world = _World()
    coordination._shared = _SharedOfRank()  # type: ignore[assignment]
    # All connect as among many ranks, so that one law holds for all numbers of them.
    control_group._MOST_CONNECTED = 1
    control_group._open_gloo = make_control_group  # type: ignore[assignment]
    tree_sums.Link._write, tree_sums.Link._read = counted_write, counted_read  # type: ignore[method-assign]
    tree_sums.Link.receive = counted_receive  # type: ignore[method-assign]
    # So that a thousand threads leave the first rank a processor; polls are not among what is compared.
    slower = max(1, job.size / 16)
    handshake._POLL_SECONDS = usual_poll * slower
    receiver._LOOK_SECONDS, receiver._LONGEST_PAUSE = usual_look * slower**2, usual_pause * slower
    _scale_memory.WAIT_SECONDS = usual_moment * slower
    try:
        yield
    finally:
        handshake._POLL_SECONDS = usual_poll
        receiver._LOOK_SECONDS, receiver._LONGEST_PAUSE = usual_look, usual_pause
        _scale_memory.WAIT_SECONDS = usual_moment
        tree_sums.Link._write, tree_sums.Link._read = usual_write, usual_read  # type: ignore[method-assign]
        tree_sums.Link.receive = usual_receive  # type: ignore[method-assign]
        control_group._open_gloo, control_group._MOST_CONNECTED = usual_open, usual_most
        coordination._shared, c10d._world = usual_shared, usual_world
        threading.Thread.start = usual_start  # type: ignore[method-assign]
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        forget_groups()


def settle(seconds: float = 0.2) -> None:
    """Let threads that answer come to rest."""
    time.sleep(seconds)
