"""A relay in front of a Prometheus server, which loses the server in the middle of an answer."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from .prometheus_server import PrometheusServer


class OutageRelay:
    """Passes queries on; at one of them it stops the server, and some tries later it starts it again.

    By number of tries and not by time, so that it is the same on any machine. Of the answer to query number
    `cut_at` half arrives. The next tries find the server really gone: the first of them ends without an
    answer, as where there is no server, and the others with status 502, as from a proxy.

    Args:
        server: Runs, and runs again after the block.
        cut_at: Number of the query whose answer is cut, from 1.
        tries: How many tries find no server before it is started again; None: it stays down.
    """

    def __init__(self, server: PrometheusServer, cut_at: int, tries: int | None) -> None:
        self._server = server
        self._cut_at = cut_at
        self._back_at = None if tries is None else cut_at + tries + 1
        self._lock = threading.Lock()
        self.queries = 0
        """How many have come."""
        self.lost: list[str] = []
        """What became of those that had no whole answer."""
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with relay._lock:
                    relay._answer(self, body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep the output of the tests clean."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)

    @property
    def url(self) -> str:
        """Its address, to use in place of the server's."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def _answer(self, to: BaseHTTPRequestHandler, body: bytes) -> None:
        self.queries += 1
        if self.queries == self._back_at:
            self._server.start()
        try:
            status, told = self._ask(to.path, body, to.headers["Content-Type"])
        except urllib.error.URLError:
            self._refuse(to)
            return
        to.send_response(status)
        to.send_header("Content-Type", "application/json")
        to.send_header("Content-Length", str(len(told)))
        to.end_headers()
        if self.queries == self._cut_at:
            to.wfile.write(told[: len(told) // 2])
            self._server.stop()
            self.lost.append("cut")
            to.close_connection = True
            return
        to.wfile.write(told)

    def _ask(self, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self._server.url + path, body, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def _refuse(self, to: BaseHTTPRequestHandler) -> None:
        to.close_connection = True
        if self.queries == self._cut_at + 1:
            self.lost.append("no answer")
            return
        self.lost.append("502")
        to.send_error(502)

    def __enter__(self) -> OutageRelay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        if not self._server.is_running:
            self._server.start()
