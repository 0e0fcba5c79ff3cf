"""Files of a checkpoint on the disks of other nodes, and the service by which nodes ask one another.

Where each node keeps a part of a checkpoint on a disk of its own, loading needs parts of others: those that
it wrote have another rank now, or a tensor lies whole on one node while every rank holds a piece of it. And
one rank commits in the object store what the nodes upload. Neither fits collectives, which all ranks enter in
one order: so each rank answers requests of others by HTTP, from a thread, while its manager is open.

A token, which ranks tell one another over their control group, keeps others out. Nothing is encrypted, as
nothing is between the ranks of a job.
"""

import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, NoReturn, Self

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import parse_json_object
from checkpoint_core.manifest import Manifest
from checkpoint_core.store_path import RangeReader, StorePath, StoreReader
from dist_env import ObjectInfo, own_address

_logger = logging.getLogger(__name__)
_CONNECTIONS = 4
"""From one rank to another at a time."""
_LOOK_SECONDS = 0.2
_SHUTDOWN_SECONDS = 0.1
_IDLE_SECONDS = 60.0
_PIECE_BYTES = 256 * 1024
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that loses its power says nothing; the system of whoever waits for it finds out within a minute."""
Task = Callable[[dict[str, Any], Callable[[], None]], dict[str, object]]
"""What a rank does when another asks: gets the request, and a function that raises once nobody waits."""


class PeerError(OSError):
    """Another rank could not do what it was asked, or did not answer."""

    said_so = False
    """Whether the rank said what it could not do: then it does nothing any more for this one."""


def _can_read(connection: socket.socket, seconds: float) -> bool:
    """Whether something comes from a connection, or its end, within some seconds."""
    # Not select.select, which refuses descriptors above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(seconds))


class _Service(ThreadingHTTPServer):
    """Answers requests for the files that this rank shares, and for tasks."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.token = secrets.token_hex(16)
        self.tasks = tasks
        self.shared: tuple[Path, frozenset[str]] | None = None
        host = own_address()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        threading.Thread(
            target=self.serve_forever, args=(_SHUTDOWN_SECONDS,), name="answering other nodes", daemon=True
        ).start()

    def server_bind(self) -> None:
        """Bind, without asking a name server for the name of this host."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that went away; what fails otherwise is told to the client."""

    def read(self, request: dict[str, Any]) -> bytes:
        """The bytes of ranges of a shared file."""
        if self.shared is None or request["file"] not in self.shared[1]:
            raise CheckpointError(f"{request['file']} is not shared.")
        path = self.shared[0] / request["file"]
        pieces = []
        with closing(RangeReader(path)) as file:
            for start, length in zip(request["starts"], request["lengths"], strict=True):
                pieces.append(file.read(start, length))
                if len(pieces[-1]) != length:
                    raise CheckpointError(f"{path} is damaged: it ended while it was being read.")
        return b"".join(pieces)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    server: _Service

    def do_POST(self) -> None:
        """Answer one request: its path is what to do, its body a JSON object of arguments."""
        if not hmac.compare_digest(self.headers.get("Authorization", ""), self.server.token):
            self.close_connection = True
            self._answer(HTTPStatus.FORBIDDEN, b"the token is wrong")
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            request = parse_json_object(body)
            if self.path == "/read":
                answer = self.server.read(request)
            else:
                answer = json.dumps(
                    self.server.tasks[self.path[1:]](request, self._check_waited_for)
                ).encode()
        except Exception as error:  # noqa: BLE001 - told to the rank that asked, which raises it
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, describe_error(error).encode())
            return
        self._answer(HTTPStatus.OK, answer)

    def _check_waited_for(self) -> None:
        # The client sends nothing more before the answer: what can be read is the end of the connection.
        if _can_read(self.connection, 0.0):
            raise PeerError("the rank that asked waits no more")

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for begin in range(0, len(body), _PIECE_BYTES):
            # The time limit is that of one write, all of it: on a slow network a large file takes longer.
            self.wfile.write(body[begin : begin + _PIECE_BYTES])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what fails is told by the rank that asked."""


class Peer:
    """Another rank, as this one asks it.

    Args:
        rank: Its number.
        host: The name of its host.
        address: Where it answers.
        token: What it wants to be told.
        timeout_seconds: How long it may take to answer a request for bytes.
    """

    def __init__(
        self, rank: int, host: str, address: tuple[str, int], token: str, timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.name = f"rank {rank} on {host}"
        self._address = address
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._idle: LifoQueue[HTTPConnection] = LifoQueue()
        self._turns = threading.Semaphore(_CONNECTIONS)

    def close(self) -> None:
        """Close idle connections."""
        while True:
            try:
                self._idle.get_nowait().close()
            except Empty:
                return

    def read(self, file: str, starts: Sequence[int], lengths: Sequence[int]) -> bytes:
        """Ranges of a file that the rank shares, one behind the other.

        Raises:
            PeerError: It cannot be read, or the rank does not answer.
        """
        with self._turns:
            request = {"file": file, "starts": list(starts), "lengths": list(lengths)}
            try:
                # One that was idle for long may have been closed.
                return self._ask(self._idle.get_nowait(), "read", request)
            except (Empty, PeerError):
                return self._ask(self._connect(), "read", request)

    def begin(self, task: str, request: Mapping[str, object]) -> "PeerTask":
        """Let the rank begin a task, which may take long.

        Args:
            task: Its name.
            request: Its arguments, as JSON.

        Raises:
            PeerError: The rank does not answer.
        """
        connection = self._connect()
        with self.failing(connection):
            self._send(connection, task, request)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in _KEEP_ALIVE.keys() & vars(socket).keys():
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEP_ALIVE[option])
        return PeerTask(self, connection)

    def run(self, task: str, request: Mapping[str, object]) -> dict[str, Any]:
        """Let the rank do something, and wait for its answer.

        Raises:
            PeerError: It failed, or the rank does not answer.
        """
        with closing(connection := self._connect()), self.failing(connection):
            self._send(connection, task, request)
            return parse_json_object(self.answer_of(connection))

    def _ask(self, connection: HTTPConnection, task: str, request: Mapping[str, object]) -> bytes:
        with self.failing(connection):
            self._send(connection, task, request)
            body = self.answer_of(connection)
        self._idle.put(connection)
        return body

    def _connect(self) -> HTTPConnection:
        return HTTPConnection(*self._address, timeout=self._timeout_seconds)

    def _send(self, connection: HTTPConnection, task: str, request: Mapping[str, object]) -> None:
        connection.request("POST", f"/{task}", json.dumps(request), {"Authorization": self._token})

    def answer_of(self, connection: HTTPConnection) -> bytes:
        """The answer of the rank.

        Raises:
            PeerError: It says what it could not do.
        """
        response = connection.getresponse()
        body = response.read()
        if response.status != HTTPStatus.OK:
            error = PeerError(f"{self.name}: {body.decode(errors='replace').removesuffix('.')}")
            error.said_so = True
            raise error
        return body

    @contextmanager
    def failing(self, connection: HTTPConnection) -> Iterator[None]:
        """Close the connection, and name the rank, when the body fails."""
        try:
            yield
        except BaseException as error:
            connection.close()
            if isinstance(error, PeerError) or not isinstance(error, (OSError, HTTPException)):
                raise
            raise PeerError(f"{self.name} does not answer ({type(error).__name__}: {error})") from error


class PeerTask:
    """What another rank does for this one."""

    def __init__(self, peer: Peer, connection: HTTPConnection) -> None:
        self.name = peer.name
        self._peer = peer
        self._connection = connection
        self._is_over = False

    def poll(self, seconds: float = _LOOK_SECONDS) -> dict[str, Any] | None:
        """Wait a moment for the answer; None where it has not come.

        Raises:
            PeerError: The task failed, or the rank is gone.
        """
        if not _can_read(self._connection.sock, seconds):
            return None
        try:
            with closing(self._connection), self._peer.failing(self._connection):
                answer = parse_json_object(self._peer.answer_of(self._connection))
        except PeerError as error:
            self._is_over = error.said_so
            raise
        self._is_over = True
        return answer

    def stop(self, seconds: float) -> bool:
        """Give the task up.

        Args:
            seconds: How long to wait until it has ended.

        Returns:
            Whether it has.
        """
        if self._is_over:
            return True
        try:
            self._connection.sock.shutdown(socket.SHUT_WR)
            return self.poll(seconds) is not None
        except OSError:
            return self._is_over  # It may have said that it was stopped, which is an error to it.
        finally:
            self._connection.close()


class Peers:
    """All ranks of a job whose nodes keep a checkpoint together. Making it is collective; to be closed.

    Args:
        ranks: The ranks.
        phase: What is being done, for messages.
        timeout_seconds: How long one may take to answer a request for bytes.
        tasks: What this rank does for others, by name.
    """

    def __init__(
        self, ranks: RankAgreement, phase: str, timeout_seconds: float, tasks: Mapping[str, Task]
    ) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        services: list[_Service] = []

        def serve() -> tuple[str, str, int, str]:
            services.append(_Service(tasks))
            host, port = services[0].server_address[:2]
            return socket.gethostname(), str(host), int(port), services[0].token

        try:
            told = ranks.run(phase, serve)
        except BaseException:
            for service in services:
                service.shutdown()
                service.server_close()
            raise
        self._service = services[0]
        self._peers = [
            Peer(rank, name, (host, port), token, timeout_seconds)
            for rank, (name, host, port, token) in enumerate(told)
        ]

    def close(self) -> None:
        """Answer no more."""
        if os.getpid() != self._pid:
            # A forked child has a copy of the port, and not the thread that shutdown() would wait for.
            self._service.server_close()
            return
        for peer in self._peers:
            peer.close()
        self._service.shutdown()
        self._service.server_close()

    def share(self, directory: Path, names: Sequence[str]) -> None:
        """Let others read files of a directory, until something else is shared."""
        self._service.shared = directory, frozenset(names)

    def others(self) -> list[Peer]:
        """The leaders of the other nodes."""
        return [self._peers[node.start] for node in self._ranks.nodes() if node != self._ranks.node]

    def beside(self, leader: int) -> Peer:
        """The rank of a node that reads for this one: each does for those in its place of other nodes."""
        return self._peers[leader + self._ranks.rank - self._ranks.leader]

    @property
    def main(self) -> Peer:
        """Rank 0."""
        return self._peers[0]

    def name(self, rank: int) -> str:
        """A rank and its host, for messages."""
        return self._peers[rank].name


@dataclass(frozen=True)
class _PeerFiles:
    """The files that one rank reads for this one, as a :class:`StoreReader`."""

    peer: Peer
    sizes: Mapping[str, int]

    def head(self, key: str) -> ObjectInfo:
        """Size of a file."""
        return ObjectInfo(key, self.sizes[key], 0.0, {})

    def get(self, key: str) -> bytes:
        """A small file."""
        return self.peer.read(key, [0], [self.sizes[key]])

    def get_ranges(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[memoryview]:
        """Ranges of a file."""
        rest = memoryview(self.peer.read(key, starts, lengths))
        pieces = []
        for length in lengths:
            pieces.append(rest[:length])
            rest = rest[length:]
        return pieces


@dataclass(frozen=True, repr=False)
class PeerPath(StorePath):
    """A file on the disk of another node."""

    files: _PeerFiles = field(kw_only=True, compare=False)

    @classmethod
    def on(cls, peer: Peer, directory: Path, name: str, size: int) -> Self:
        """A file.

        Args:
            peer: Who reads it for this rank.
            directory: The checkpoint's directory on this node, for messages.
            name: Its path relative to it.
            size: Bytes.
        """
        return cls(f"{directory} of {peer.name}", name, files=_PeerFiles(peer, {name: size}))

    @property
    def reader(self) -> StoreReader:
        """Who reads it, in the place of a store."""
        return self.files

    def _at(self, key: str) -> NoReturn:
        raise CheckpointError(f"{self} is a single file.")


def file_finder(
    ranks: RankAgreement,
    peers: Peers | None,
    directory: Path,
    manifest: Manifest,
    keepers: Mapping[str, int] | None,
) -> Callable[[str], Path]:
    """Where the files of a checkpoint are read; from now on other nodes can read those that this one keeps.

    Args:
        ranks: The ranks.
        peers: The nodes, where they keep checkpoints together.
        directory: The checkpoint.
        manifest: What it holds.
        keepers: The leader of the node that keeps it, by file; None where this rank sees all files.

    Returns:
        The place of a file, by its path relative to the directory.
    """
    if keepers is None or peers is None:
        return lambda name: directory / name
    own = [name for name, keeper in keepers.items() if keeper == ranks.leader]
    peers.share(directory, own)
    nodes = sorted({keeper for keeper in keepers.values() if keeper != ranks.leader})
    if ranks.is_leader and nodes:
        _logger.info(
            "%s: the node of rank %d has %d of %d files; it reads the others from %s",
            directory,
            ranks.rank,
            len(own),
            len(keepers),
            ", ".join(map(peers.name, nodes)),
        )

    def find(name: str) -> Path:
        if keepers.get(name, ranks.leader) == ranks.leader:
            return directory / name  # Also what was deleted, which is not there.
        return PeerPath.on(peers.beside(keepers[name]), directory, name, manifest.files[name].size)

    return find
