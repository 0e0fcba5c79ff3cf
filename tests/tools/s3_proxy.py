"""A proxy before a real S3 server: counts what is read, and does to answers what bad networks do.

It passes requests on as they are, signatures and the header `Host` included, which the server checks.
"""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["refuse", "truncate", "late", "lost answer", "close"]
"""Answer 503 SlowDown; end the body early; answer a second late, so that answers change their order; do what
was asked and close the connection without an answer; close it without asking the server."""
Answer = tuple[int, str]
"""Status and body of an answer that is not the server's."""
_PIECE = 64 * 1024
_HOP = {"connection", "transfer-encoding", "keep-alive"}
_SLOW_DOWN = "<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"


@dataclass(frozen=True)
class Request:
    """What was asked, and how many bytes of a body went back."""

    method: str
    path: str
    """Bucket and key."""
    query: str
    received: int
    """Bytes of the client's body."""
    sent: int
    """Bytes of the body that was answered."""
    status: int


@dataclass
class Proxy:
    """A proxy that runs until `close`.

    Args:
        endpoint: Address of the server.
        fault: Chooses what happens to a request, by its method, path with query, and number.
        delay_s: Before each answer.
        bytes_per_s: What all answers and uploads together may take; None for no limit.
    """

    endpoint: str
    fault: Callable[[str, str, int], Fault | Answer | None] = lambda method, path, number: None
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault | Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin to listen."""
        self._lock = threading.Lock()
        self._number = 0
        self._free_at = 0.0
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def read(self, pattern: str = "") -> int:
        """Bytes that were read of objects whose path matches a pattern."""
        return sum(
            each.sent
            for each in self.requests
            if each.method == "GET" and not each.query and re.search(pattern, each.path)
        )

    def next_fault(self, method: str, path: str) -> Fault | Answer | None:
        """What happens to the next request."""
        with self._lock:
            self._number += 1
            number = self._number
            chosen = self.fault(method, path, number)
            if chosen is not None:
                self.faults.append(chosen)
        return chosen

    def note(self, request: Request) -> None:
        """Count a request."""
        with self._lock:
            self.requests.append(request)

    def pace(self, size: int) -> None:
        """Wait until so many bytes more may pass."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.bytes_per_s
            wait = self._free_at - now
        time.sleep(wait)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        owner, parts = self.owner, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        owner.pace(len(body))
        fault = owner.next_fault(self.command, self.path)
        time.sleep(owner.delay_s)
        if fault == "close":
            self.close_connection = True
            return
        if fault == "refuse" or isinstance(fault, tuple):
            status, text = fault if isinstance(fault, tuple) else (503, _SLOW_DOWN)
            told = b"" if self.command == "HEAD" else text.encode()
            self._answer(status, {"Content-Type": "application/xml"}, told, length=str(len(text.encode())))
            owner.note(Request(self.command, parts.path, parts.query, len(body), 0, status))
            return
        if fault == "late":
            time.sleep(1.0)
        upstream = urlsplit(owner.endpoint)
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            # The server is gone, as the client is to see.
            self.close_connection = True
            return
        finally:
            connection.close()
        if fault == "lost answer":
            self.close_connection = True
            return
        told = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if self.command == "HEAD":
            self._answer(answer.status, told, b"", length=told.get("Content-Length"))
        else:
            cut = len(content) // 2 if fault == "truncate" and content else None
            self._answer(answer.status, told, content, cut=cut)
        owner.note(Request(self.command, parts.path, parts.query, len(body), len(content), answer.status))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes,
        *,
        cut: int | None = None,
        length: str | None = None,
    ) -> None:
        try:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            for begin in range(0, len(content if cut is None else content[:cut]), _PIECE):
                piece = content[begin : min(begin + _PIECE, len(content) if cut is None else cut)]
                self.owner.pace(len(piece))
                self.wfile.write(piece)
            if cut is not None:
                self.close_connection = True
        except OSError:
            self.close_connection = True  # The client has gone.
