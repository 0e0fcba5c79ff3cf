"""An HTTP endpoint that Prometheus can scrape; needs the extra `prometheus`."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

from .training_series import Figures

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "PrometheusExporter needs prometheus-client: pip install 'perf-metrics[prometheus]'"
    ) from missing


class MetricsEndpoint:
    """Serves the last figures given to it, under `/metrics`, from a thread of its own.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        labels: Constant labels of all series.

    Raises:
        OSError: Nothing can listen there; names both settings.
    """

    def __init__(self, host: str, port: int, labels: Mapping[str, str]) -> None:
        self._told = _Told(labels)
        registry = CollectorRegistry()
        registry.register(self._told)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(
                error.errno,
                f"port={port}, host={host!r}: the exporter cannot listen there ({error.strerror}); give a "
                "free port and an address of this machine, or port=0 for any free port",
            ) from error
        self.port: int = self._server.server_port

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


class _Told(Collector):
    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self.figures: Figures = {}

    def collect(self) -> Iterator[Metric]:
        for series, value in self.figures.items():
            family: CounterMetricFamily | GaugeMetricFamily
            if series.kind == "counter":
                family = CounterMetricFamily(series.name, series.text, labels=self._names)
            else:
                family = GaugeMetricFamily(series.name, series.text, labels=self._names)
            family.add_metric(self._values, value)
            yield family
