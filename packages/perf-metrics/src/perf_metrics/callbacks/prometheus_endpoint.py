"""An HTTP endpoint that Prometheus can scrape; needs the extra `prometheus`."""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ..monitoring.series import Figures

try:
    from prometheus_client import CollectorRegistry, MetricsHandler
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "PrometheusExporter needs prometheus-client. Install it with `pip install "
        "'perf-metrics[prometheus]'`."
    ) from missing

_logger = logging.getLogger("perf_metrics")

MOST_CONNECTIONS = 16
"""Connections at a time. A scrape takes milliseconds, and a Prometheus or two need one each."""
PATIENCE_S = 10.0
"""Seconds from the beginning of a connection to its end; Prometheus gives a scrape as long by default."""


class MetricsEndpoint:
    """Serves the last figures given to it, under `/metrics`, from a thread of its own.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        labels: Constant labels of all series.
        live: Returns further figures, when somebody asks.
        patience_s: Seconds after which a connection is dropped, whatever it has sent or read until then.

    Raises:
        OSError: Nothing can listen there; names both settings.
    """

    def __init__(
        self,
        host: str,
        port: int,
        labels: Mapping[str, str],
        *,
        live: Callable[[], Figures] = dict,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._told = _Told(labels, live)
        registry = CollectorRegistry()
        registry.register(self._told)
        try:
            self._server = _Server(host, port, registry, patience_s)
        except OSError as error:
            raise OSError(
                error.errno,
                f"port={port}, host={host!r} is not an address where the exporter can listen "
                f"({error.strerror}). Give a free port and an address of this machine, or port=0 for any "
                "free port.",
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(min(0.5, patience_s / 4),), daemon=True
        )
        self._thread.start()

    def tell(self, figures: Figures) -> None:
        """Serve these figures from now on, and no others."""
        # One assignment, so that a scrape sees all of a record or nothing of it.
        self._told.figures = dict(figures)

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._server.shutdown()
        self._thread.join()
        # Processes forked since, such as those of a data loader, have the socket too, and would keep the port
        # when it is only closed here. Not every system lets a listening socket be shut down.
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._server.drop_older_than(0.0)


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection, for so many of them at a time and each for so long.

    Whoever connects and says nothing, sends a byte a second, or never reads the answer would otherwise keep a
    thread and a file of the training process for ever; many of them, all that it may have.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, registry: CollectorRegistry, patience_s: float) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]  # IPv4 or IPv6
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._since: dict[Any, float] = {}
        """When each open connection began, the oldest first."""
        handler: type[MetricsHandler] = MetricsHandler.factory(registry)
        super().__init__((str(address[0]), int(address[1])), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            # The oldest goes, not this one: a scrape that is worth its time is over before it is the oldest.
            crowd = list(self._since)[: max(0, len(self._since) - MOST_CONNECTIONS + 1)]
            for connection in crowd:
                self._drop(connection)
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        # The loop of `serve_forever` calls this several times a second.
        super().service_actions()
        self.drop_older_than(self._patience_s)

    def drop_older_than(self, seconds: float) -> None:
        """Drop the connections that began so many seconds ago or earlier."""
        with self._lock:
            latest = time.monotonic() - seconds
            for connection in [one for one, began in self._since.items() if began <= latest]:
                self._drop(connection)

    def _drop(self, connection: Any) -> None:
        # Its thread wakes up at the end of the file, and closes it.
        del self._since[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A connection that broke off is not an error of the training; its traceback would fill the log.
        if not isinstance(error := sys.exception(), OSError):
            _logger.warning("a scrape from %s failed: %r", client_address, error)


class _Told(Collector):
    def __init__(self, labels: Mapping[str, str], live: Callable[[], Figures]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self.figures: Figures = {}
        self.live = live

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for series, value in {**self.figures, **self.live()}.items():
            if (family := families.get(series.name)) is None:
                kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
                names = [*self._names, *(name for name, _ in series.labels)]
                family = families[series.name] = kind(series.name, series.text, labels=names)
            family.add_metric([*self._values, *(label for _, label in series.labels)], value)
        yield from families.values()
