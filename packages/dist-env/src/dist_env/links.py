"""Connections between two ranks for a few numbers at a time."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import cast

import torch.distributed as dist

_HEADER = struct.Struct("<II")
_INTRODUCTION = struct.Struct("<16sI")
_LOOK_SECONDS = 0.5
_SILENT_STRANGER_SECONDS = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""A host that vanished without a word is noticed after two minutes."""


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
        try:
            self._socket.sendall(_HEADER.pack(number, len(values)) + struct.pack(f"<{len(values)}d", *values))
        except OSError as error:
            raise self._broken(error) from error

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
                f"at its exchange {number}, of {count}: the ranks do not do the same thing"
            )
        return struct.unpack(f"<{count}d", self._read(8 * count))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

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
    host = _own_address()
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
                named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in sorted(missing))
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

    Args:
        listener: Where they connect.
        secret: What a rank says first.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._said: dict[socket.socket, tuple[float, bytes]] = {}
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
            connection = cast(socket.socket, key.fileobj)
            if (rank := self._hear(connection)) is not None:
                introduced.append((rank, connection))
        too_long = time.monotonic() - _SILENT_STRANGER_SECONDS
        for connection in [each for each, (since, _) in self._said.items() if since < too_long]:
            self._forget(connection)
            connection.close()
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
        self._said[connection] = time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> int | None:
        """The rank of a connection, once it has said so; others are closed."""
        since, said = self._said[connection]
        try:
            more = connection.recv(_INTRODUCTION.size - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < _INTRODUCTION.size:
            self._said[connection] = since, said
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


def _own_address() -> str:
    """Own address on the route to rank 0, which every rank has reached; loopback if that is on this host."""
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
