"""Connections between two ranks for a few numbers at a time."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

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
    while missing := hosts.keys() - links.keys():
        listener.settimeout(_LOOK_SECONDS)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            look()
            if time.monotonic() < end:
                continue
            named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in sorted(missing))
            raise dist.DistNetworkError(f"{named} did not connect within {seconds:g} s") from error
        rank = _introduced(connection, secret)
        if rank not in missing:
            connection.close()
            continue
        links[rank] = Link(connection, f"rank {rank} on {hosts[rank]}", seconds)
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


def _introduced(connection: socket.socket, secret: bytes) -> int:
    """The rank that has connected; -1 for somebody else."""
    connection.settimeout(_SILENT_STRANGER_SECONDS)
    try:
        said, rank = _INTRODUCTION.unpack(read_exactly(connection, _INTRODUCTION.size))
    except OSError:
        return -1
    return int(rank) if hmac.compare_digest(said, secret) else -1


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
