"""The servers of these tests: started, stopped and started again with the same data and port."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from .prometheus_server import PrometheusServer, backfill

OLD = "# TYPE up gauge\nup 3.5 1767225600\nup 4.5 1767225630\n# EOF\n"
"""Two samples of January 2026."""


def test_old_samples_are_served_and_are_still_there_after_a_restart(
    prometheus_server: Callable[..., PrometheusServer], tmp_path: Path
) -> None:
    (tmp_path / "old.om").write_text(OLD)
    server = prometheus_server()
    server.backfill(tmp_path / "old.om")
    with server:
        assert values(server) == ["3.5", "4.5"]
        url = server.url
    with pytest.raises(urllib.error.URLError):
        values(server)
    with server:
        assert server.url == url
        assert values(server) == ["3.5", "4.5"]


def test_a_config_that_is_refused_shows_its_log(
    prometheus_server: Callable[..., PrometheusServer],
) -> None:
    with pytest.raises(RuntimeError, match="field scrape_config not found"):
        prometheus_server("scrape_config: []\n").start()


@pytest.mark.usefixtures("prometheus_binaries")
def test_a_file_that_promtool_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.om").write_text("up 3.5 1767225600\n")
    with pytest.raises(RuntimeError, match="does not end with # EOF"):
        backfill(tmp_path / "bad.om", tmp_path)


def values(server: PrometheusServer) -> list[str]:
    (series,) = server.query("up[1m]", 1767225640)
    return [value for _, value in series["values"]]
