"""Sums of a few numbers over all ranks, from host to host, through a tree of TCP connections.

A collective backend moves large tensors; for a few bytes its threads and handshakes cost far more than the
message. Loops that agree on something in every step pay that in every step: between two ranks of one host a
sum takes 25 us here, and 230 us or more by gloo (torch 2.13). So it does not go through `ControlGroup`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from torch import distributed as dist
from torch.autograd import profiler

from dist_env.collectives import training_timeout
from dist_env.coordination import Coordinator, coordinator_of
from dist_env.errors import DistributedEnvironmentError, listed
from dist_env.interface import DistributedEnvInterface

_FAN_OUT = 16
"""Ranks that report to one. Each costs it a few microseconds; each floor of the tree costs a round trip."""
_HEADER = struct.Struct("<II")
_INTRODUCTION = struct.Struct("<16sI")
_LOOK_SECONDS = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A host that vanished without a word is noticed after two minutes."""


class HostSums:
    """Sums of a few numbers over all ranks of a job, in host memory.

    The ranks form a tree of TCP connections, 16 below each. Numbers go up, added in a fixed order, and the
    sums come down, so that all ranks get the same bits. The host waits for the other hosts; no device is
    involved. Making it is collective. With one rank nothing is opened.

    Args:
        env: Environment of this process.
        timeout: Seconds to wait for another rank; None takes the environment's `training_timeout`.

    Raises:
        DistributedEnvironmentError: `timeout` is not positive, or there is no process group.
        RankTimeoutError, torch.distributed.DistNetworkError: A rank does not come, or cannot be reached.
        RankFailedError: A rank failed.
    """

    def __init__(self, env: DistributedEnvInterface, *, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise DistributedEnvironmentError(f"timeout={timeout!r} is not a positive number of seconds.")
        self._above: Link | None = None
        self._below: list[Link] = []
        self._number = 0
        if env.world_size > 1:
            seconds = training_timeout(env) if timeout is None else timeout
            self._open(env, coordinator_of(env), seconds)
        links = [*self._below, *([self._above] if self._above else [])]
        self._end = weakref.finalize(self, _close, links)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers over the ranks; collective.

        Args:
            numbers: At least one, as many on every rank. Whole numbers up to 2**53 are added exactly.

        Returns:
            The sums, as float64, the same on all ranks.

        Raises:
            torch.distributed.DistNetworkError: A connection broke, or nothing came in time. It names the
                other end, which need not be the rank at fault: see `naming_lost_ranks`.
            RuntimeError: The ranks do not do the same thing.
        """
        # A span in traces of a profiler, where waiting for another rank would look like an idle host. torch
        # 2.11 to 2.13 ask the same private name: a span takes microseconds without a profiler, too. A torch
        # without the name always gets the span, so that no trace lacks it.
        if getattr(profiler, "_is_profiler_enabled", True):
            with profiler.record_function("host:all_reduce"):
                return self._sum(numbers)
        return self._sum(numbers)

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        self._number += 1
        totals = [float(number) for number in numbers]
        for link in self._below:
            theirs = link.receive(self._number, len(totals))
            totals = [a + b for a, b in zip(totals, theirs, strict=True)]
        if self._above is not None:
            self._above.send(self._number, totals)
            totals = list(self._above.receive(self._number, len(totals)))
        for link in self._below:
            link.send(self._number, totals)
        return totals

    def close(self) -> None:
        """Close the connections of this rank. Happens by itself when nobody holds this any more."""
        self._end()

    def _open(self, env: DistributedEnvInterface, coordinator: Coordinator, seconds: float) -> None:
        key = f"host sums/{coordinator.next_call('host sums')}"
        above = (env.rank - 1) // _FAN_OUT if env.rank else None
        first = env.rank * _FAN_OUT + 1
        below = range(first, min(first + _FAN_OUT, env.world_size))
        if below:
            secret = secrets.token_bytes(16)
            with listen() as (listener, address):
                coordinator.store.set(f"{key}/{env.rank}", f"{address} {secret.hex()}")
                hosts = {rank: coordinator.host_of(rank) for rank in below}
                self._below = accept(listener, secret, hosts, seconds, coordinator.raise_if_failed)
        if above is not None:
            told = coordinator.wait_for(f"{key}/{above}", above, seconds, "connecting the ranks")
            address, secret_hex = told.decode().split(" ")
            name = f"rank {above} on {coordinator.host_of(above)}"
            self._above = connect(address, bytes.fromhex(secret_hex), env.rank, name, seconds)


def _close(links: Sequence[Link]) -> None:
    for link in links:
        link.close()


class Link:
    """One end of a connection.

    Args:
        connection: A connected socket.
        name: The rank at the other end, for messages.
        seconds: How long to wait for it.
    """

    def __init__(self, connection: socket.socket, name: str, seconds: float) -> None:
        self._socket = connection
        self._name = name
        self._seconds = seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        # The system keeps the time: Python would ask it before every read.
        connection.settimeout(None)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, number: int, values: Sequence[float]) -> None:
        """Send the values of an exchange.

        Raises:
            torch.distributed.DistNetworkError: The connection is broken.
        """
        self._write(_HEADER.pack(number, len(values)) + struct.pack(f"<{len(values)}d", *values))

    def receive(self, number: int, count: int) -> tuple[float, ...]:
        """Receive the values of an exchange.

        Raises:
            torch.distributed.DistNetworkError: The connection is broken, or nothing came in time.
            RuntimeError: The other end is at another exchange.
        """
        its_number, its_count = _HEADER.unpack(self._read(_HEADER.size))
        if (its_number, its_count) != (number, count):
            raise RuntimeError(
                f"{self._name} is at its exchange {its_number}, of {its_count} numbers, while this rank is "
                f"at its exchange {number}, of {count}, so the ranks do not do the same thing. Let every "
                "rank call the same things in the same order."
            )
        return struct.unpack(f"<{count}d", self._read(8 * count))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._broken(error) from error

    def _read(self, size: int) -> bytes:
        try:
            return read_exactly(self._socket, size)
        except BlockingIOError as error:
            raise dist.DistNetworkError(f"{self._name} sent nothing for {self._seconds:g} s") from error
        except OSError as error:
            raise self._broken(error) from error

    def _broken(self, error: OSError) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"the connection to {self._name} broke: {error}")


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        ConnectionError: The other end was closed before.
        OSError: The connection is broken, or a limit of time has passed.
    """
    received = connection.recv(size, socket.MSG_WAITALL)
    while len(received) < size:
        more = connection.recv(size - len(received), socket.MSG_WAITALL)
        if not more:
            raise ConnectionResetError("it was closed at the other end")
        received += more
    return received


@contextmanager
def listen() -> Iterator[tuple[socket.socket, str]]:
    """Listen where other hosts of the job can reach this one; yields the listener and `host:port`."""
    host = own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=128) as listener:
        yield listener, f"{host}:{listener.getsockname()[1]}"


def accept(
    listener: socket.socket,
    secret: bytes,
    hosts: Mapping[int, str],
    seconds: float,
    look: Callable[[], None],
) -> list[Link]:
    """Wait until some ranks have connected.

    Args:
        listener: What `listen` gave.
        secret: What they have to say first; whoever does not is sent away.
        hosts: Host of each rank that will come.
        seconds: How long to wait for all of them.
        look: Called while nobody comes; raises if there is no use in waiting.

    Returns:
        A link to each, in the order of the ranks.

    Raises:
        torch.distributed.DistNetworkError: Some did not come; names them.
    """
    links: dict[int, Link] = {}
    end = time.monotonic() + seconds
    with closing(_Callers(listener, secret)) as callers:
        while missing := hosts.keys() - links.keys():
            introduced = callers.wait(_LOOK_SECONDS)
            for rank, connection in introduced:
                if rank in missing and rank not in links:
                    links[rank] = Link(connection, f"rank {rank} on {hosts[rank]}", seconds)
                else:
                    connection.close()
            if introduced:
                continue
            look()
            if time.monotonic() >= end:
                named = listed(f"rank {rank} ({hosts[rank]})" for rank in sorted(missing))
                raise dist.DistNetworkError(f"{named} did not connect within {seconds:g} s")
    return [links[rank] for rank in sorted(links)]


def connect(address: str, secret: bytes, rank: int, name: str, seconds: float) -> Link:
    """Connect to a rank that listens.

    Args:
        address: `host:port`.
        secret: What to say first.
        rank: This rank.
        name: The other one, for messages.
        seconds: How long to wait for it.

    Raises:
        torch.distributed.DistNetworkError: It cannot be reached.
    """
    host, port = address.rsplit(":", 1)
    try:
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        connection.sendall(_INTRODUCTION.pack(secret, rank))
    except OSError as error:
        raise dist.DistNetworkError(f"{name} cannot be reached at {address}: {error}") from error
    return Link(connection, name, seconds)


class _Callers:
    """Whoever has connected and has not yet said who it is; the silent ones do not keep the others waiting.

    Nobody is sent away for being silent: a rank may be stopped at just this point, and would not learn of it.

    Args:
        listener: Where they connect.
        secret: What a rank says first.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._said: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[tuple[int, socket.socket]]:
        """Wait for somebody to say something; gives ranks that said who they are, and their connections."""
        introduced = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._admit()
                continue
            connection: socket.socket = key.data
            if (rank := self._hear(connection)) is not None:
                introduced.append((rank, connection))
        return introduced

    def close(self) -> None:
        """Send away who has said nothing."""
        for connection in list(self._said):
            connection.close()
        self._selector.close()

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # It has gone again.
        connection.setblocking(False)
        self._said[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, connection: socket.socket) -> int | None:
        """The rank of a connection, once it has said so; others are closed."""
        said = self._said[connection]
        try:
            more = connection.recv(_INTRODUCTION.size - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < _INTRODUCTION.size:
            self._said[connection] = said
            return None
        self._forget(connection)
        if more:
            secret, rank = _INTRODUCTION.unpack(said)
            if hmac.compare_digest(secret, self._secret):
                connection.setblocking(True)
                return int(rank)
        connection.close()
        return None

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._said[connection]


def own_address() -> str:
    """Address of this host on the route to ``MASTER_ADDR``, which every rank has reached.

    Returns:
        The numeric address; that of the loopback where rank 0 is on this host, or without ``MASTER_ADDR``.

    Raises:
        torch.distributed.DistNetworkError: No route leads there.
    """
    master = os.environ.get("MASTER_ADDR", "localhost")
    for family, _, _, _, target in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        try:
            # Connecting a datagram socket sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as error:
            unreachable = error
    raise dist.DistNetworkError(f"no route to MASTER_ADDR={master}: {unreachable}")
