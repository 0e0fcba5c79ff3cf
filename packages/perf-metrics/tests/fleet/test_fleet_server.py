"""`perf-metrics fleet` when the Prometheus server goes away, stays away, or refuses the query."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .fleet_command import ServedFleet, report_of, run
from .outage_relay import OutageRelay
from .prometheus_server import PrometheusServer

pytestmark = pytest.mark.xdist_group("fleet")


@pytest.fixture(scope="module")
def undisturbed(small_fleet: ServedFleet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(small_fleet.with_mfu(), tmp_path_factory.mktemp("undisturbed"))


def test_a_server_that_comes_back_gives_the_report_of_an_undisturbed_one(
    small_fleet: ServedFleet, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Stopped while an answer arrives, gone for three tries, and started again."""
    with OutageRelay(small_fleet.server, cut_at=4, tries=3) as relay:
        report = report_of(small_fleet.with_mfu(url=relay.url), tmp_path)
    assert relay.lost == ["cut", "no answer", "502", "502"]
    assert report == undisturbed


@pytest.mark.full
def test_a_server_that_stays_away_gives_no_report_and_says_why(
    small_fleet: ServedFleet, tmp_path: Path
) -> None:
    with OutageRelay(small_fleet.server, cut_at=4, tries=None) as relay:
        done = run(small_fleet.with_mfu("--patience", "2", *_outputs(tmp_path), url=relay.url))
    assert relay.lost[:2] == ["cut", "no answer"]
    _assert_no_report(done.returncode, done.stdout, tmp_path)
    first, last = done.stderr.splitlines()
    assert first.startswith(f"perf-metrics: {relay.url} gives no answer")
    assert last.startswith(f"perf-metrics: {relay.url} gave no answer for")
    assert "there is no report" in last


def test_an_address_where_nothing_listens_gives_no_report_and_says_why(
    prometheus_server: Callable[..., PrometheusServer], small_fleet: ServedFleet, tmp_path: Path
) -> None:
    url = prometheus_server().url
    done = run(small_fleet.with_mfu("--patience", "1", *_outputs(tmp_path), url=url))
    _assert_no_report(done.returncode, done.stdout, tmp_path)
    assert f"{url} gave no answer" in done.stderr
    assert "Connection refused" in done.stderr


def test_a_query_that_the_server_refuses_is_told_in_its_words(
    small_fleet: ServedFleet, tmp_path: Path
) -> None:
    done = run(small_fleet.with_mfu("--selector", 'cluster=~"("', *_outputs(tmp_path)))
    _assert_no_report(done.returncode, done.stdout, tmp_path)
    (line,) = done.stderr.splitlines()
    assert "error parsing regexp: missing closing )" in line


def test_a_server_that_may_load_few_samples_is_asked_for_shorter_times(
    small_fleet: ServedFleet,
    undisturbed: dict[str, Any],
    prometheus_server: Callable[..., PrometheusServer],
    tmp_path: Path,
) -> None:
    limited = prometheus_server(options=("--query.max-samples=20000",))
    shutil.copytree(small_fleet.server.data_folder, limited.data_folder, dirs_exist_ok=True)
    with limited:
        with pytest.raises(ValueError, match="too many samples"):
            limited.query('{__name__=~"DCGM.*"}[1d]', small_fleet.fleet.truth.end_s)
        report = report_of(small_fleet.with_mfu(url=limited.url), tmp_path)
    assert _sorted_notes(report) == _sorted_notes(undisturbed)


def _sorted_notes(report: dict[str, Any]) -> dict[str, Any]:
    """In other stretches of time, what is blank comes up in another order."""
    return {**report, "notes": sorted(report["notes"])}


def _outputs(folder: Path) -> tuple[str, ...]:
    return "--json", str(folder / "report.json"), "--html", str(folder / "report.html")


def _assert_no_report(status: int, printed: str, folder: Path) -> None:
    assert status == 2
    assert printed == ""
    assert list(folder.glob("report*")) == []
