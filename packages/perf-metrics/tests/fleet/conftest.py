"""Real Prometheus servers, one of them with a synthetic fleet, and what to do where there are none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .fleet_command import ServedFleet
from .prometheus_server import PrometheusServer, missing_binaries
from .synthetic_fleet import write_fleet
from .synthetic_plan import FleetSize

StartServer = Callable[..., PrometheusServer]
SMALL = FleetSize(jobs=60, days=2)


@pytest.fixture(scope="session")
def prometheus_binaries() -> None:
    """Skip without the binaries of Prometheus; with PERF_METRICS_NEED_SERVERS=1, which CI sets, fail."""
    missing = missing_binaries()
    if not missing:
        return
    text = f"not on the path: {', '.join(missing)}; install Prometheus (Debian: apt-get install prometheus)"
    if os.environ.get("PERF_METRICS_NEED_SERVERS") == "1":
        pytest.fail(f"PERF_METRICS_NEED_SERVERS=1, but {text}")
    pytest.skip(text)


@pytest.fixture
def prometheus_server(prometheus_binaries: None, tmp_path: Path) -> Iterator[StartServer]:
    """Make servers that are stopped after the test: `prometheus_server(config=None, port=None).start()`."""
    servers: list[PrometheusServer] = []

    def make(
        config: str | None = None, port: int | None = None, options: tuple[str, ...] = ()
    ) -> PrometheusServer:
        folder = tmp_path / f"prometheus-{len(servers)}"
        servers.append(PrometheusServer(folder, config, port, options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def small_fleet(prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFleet]:
    """60 jobs in two days, with everything planted, in a server that runs."""
    folder = tmp_path_factory.mktemp("fleet")
    fleet = write_fleet(folder, SMALL)
    server = PrometheusServer(folder / "prometheus")
    for path in fleet.openmetrics:
        server.backfill(path)
    with server:
        yield ServedFleet(fleet, server)
