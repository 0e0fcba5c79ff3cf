"""What is not to be taken for a faulty GPU, and which XID errors a gauge can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from perf_metrics import Device, FleetReport, FleetSamples, PrometheusAPI, collect_gpu_health, fleet_report

from .dcgm_series import MODEL
from .openmetrics_pieces import Pieces
from .prometheus_server import PrometheusServer
from .synthetic_plan import START_S

HOUR = 3600
Reading = tuple[float, float]
"""Tensor activity and SM clock in MHz."""


def report_of(
    *jobs: Sequence[Reading], steps: int = 240, slices: int = 1, runs: Sequence[str] = ()
) -> FleetReport:
    """Jobs one after the other on the same GPUs, with these readings of each."""
    fleet = FleetSamples(0.0, 24.0 * HOUR, 30.0)
    for number, gpus in enumerate(jobs):
        for step in range(steps):
            for index, (activity, mhz) in enumerate(gpus):
                for place in range(slices):
                    instance = None if slices == 1 else str(place)
                    device = Device("n", str(index), f"GPU-{index}", MODEL, instance and "3g.40gb", instance)
                    fleet.add(f"job-{number}", device, 600 + 10_000 * number + 30 * step, activity, mhz)
    return fleet_report(fleet)


def verdicts(report: FleetReport) -> dict[str | None, str]:
    return {one.device.uuid: one.level for one in report.gpus}


STEADY: Reading = (0.5, 1350.0)


def test_one_gpu_that_works_among_seven_that_do_nothing() -> None:
    """Its clock is lower than those of idle GPUs, and nobody waits for it."""
    report = report_of([STEADY, *[(0.0, 1980.0)] * 7])
    assert verdicts(report) == {}
    assert report.hours["low clock"] == 0


def test_a_stage_that_does_more_than_the_others() -> None:
    assert verdicts(report_of([(0.6, 1350.0), *[(0.4, 1600.0)] * 7])) == {}


def test_an_idle_job_has_no_straggler() -> None:
    assert verdicts(report_of([(0.0002, 345.0), *[(0.0, 1980.0)] * 7])) == {}


def test_half_a_minute_says_nothing() -> None:
    assert verdicts(report_of([(0.75, 900.0), *[STEADY] * 7], steps=1)) == {}


def test_gpus_that_jobs_do_not_use_are_to_be_looked_at() -> None:
    gpus: list[Reading] = [*[STEADY] * 6, (0.0, 1980.0)]
    report = report_of(gpus, gpus)
    assert verdicts(report) == {"GPU-6": "watch"}
    assert "is it used at all?" in report.gpus[0].evidence[0].text


def test_a_late_start_of_most_gpus_is_no_median() -> None:
    """Eight GPUs that do nothing for ten minutes, and then four that work, one of them less."""
    fleet = FleetSamples(0.0, 24.0 * HOUR, 30.0)
    for step in range(20):
        for index in range(8):
            fleet.add("job", Device("b", str(index), f"GPU-b{index}", MODEL), 600 + 30 * step, 0.0, 1350.0)
    for step in range(20, 380):
        for index in range(4):
            activity = 0.2 if index == 3 else 0.5
            device = Device("a", str(index), f"GPU-a{index}", MODEL)
            fleet.add("job", device, 600 + 30 * step, activity, 1350.0)
    (gpu,) = fleet_report(fleet).gpus
    assert (gpu.device.uuid, gpu.level) == ("GPU-a3", "watch")
    assert "40% of that of the others" in gpu.evidence[0].text
    assert gpu.lost_hours == pytest.approx(3 * 0.6, rel=0.01)


def test_slices_of_a_slow_gpu_count_once() -> None:
    report = report_of([(0.75, 900.0), *[STEADY] * 3], slices=2)
    (gpu,) = report.gpus
    assert (gpu.jobs, gpu.job_hours) == (1, pytest.approx(2))
    assert gpu.lost_hours == pytest.approx(report.hours["low clock"])
    assert "in 1 of its 1 jobs" in gpu.evidence[0].text


# XID errors, in a real Prometheus.

XIDS: Mapping[str, Sequence[tuple[float, int | None]]] = {
    # By hours from the start: the gauge shows so much from then on; None: the series ends.
    "since long": [(-5, 79)],
    "away at the start": [(-5, 79), (-0.05, None), (0.1, 79)],
    "twice": [(-1, 0), (1, 79), (2, 0), (3, 79)],
    "repaired and again": [(-5, 79), (1, 0), (2, 79)],
    "another hides it": [(-1, 0), (1, 154)],
    "first seen with it": [(2, 31)],
}


@pytest.fixture(scope="module")
def xids(
    prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[str, str, str]]]:
    """Kind, level and text of the evidence by GPU."""
    folder: Path = tmp_path_factory.mktemp("xids")
    with Pieces(folder) as pieces:
        for name, events in XIDS.items():
            _write(pieces, "DCGM_FI_DEV_XID_ERRORS", f'UUID="{name}",Hostname="n",gpu="0"', events)
        # What dcgm-exporter counts in its own window, where it is asked to.
        _write(
            pieces,
            "DCGM_EXP_XID_ERRORS_COUNT",
            'UUID="another hides it",Hostname="n",gpu="0",xid="62"',
            [(1, 1), (1.1, None)],
        )
    server = PrometheusServer(folder / "prometheus")
    for path in pieces.paths:
        server.backfill(path)
    with server:
        api = PrometheusAPI(server.url)
        health = collect_gpu_health(api, START_S, START_S + 4 * HOUR)
    report = fleet_report(FleetSamples(START_S, START_S + 4.0 * HOUR, 30.0), health=health)
    return {
        one.device.uuid or "": [(each.kind, each.level, each.text) for each in one.evidence]
        for one in report.gpus
    }


def _write(pieces: Pieces, name: str, labels: str, events: Sequence[tuple[float, int | None]]) -> None:
    ends = [at for at, _ in events[1:]] + [4.1]
    for (at, value), until in zip(events, ends, strict=True):
        times = [1000 * time for time in range(START_S + round(at * HOUR), START_S + round(until * HOUR), 30)]
        if value is not None:
            pieces.write(name, labels, times, [float(value)] * len(times))


def test_an_error_from_before_is_no_new_one(xids: dict[str, list[tuple[str, str, str]]]) -> None:
    for name in ("since long", "away at the start"):
        ((kind, level, text),) = xids[name]
        assert (kind, level) == ("XID 79", "watch"), name
        assert "before this range" in text
    # An application's error from before it was seen says nothing of the GPU.
    assert "first seen with it" not in xids


def test_an_error_that_comes_again_is_new(xids: dict[str, list[tuple[str, str, str]]]) -> None:
    for name, often in (("twice", "2 times"), ("repaired and again", "once")):
        ((kind, level, text),) = xids[name]
        assert (kind, level) == ("XID 79", "take out"), name
        assert text.endswith(often)


def test_an_error_that_another_one_hides_is_counted_or_told(
    xids: dict[str, list[tuple[str, str, str]]],
) -> None:
    levels = {kind: level for kind, level, _ in xids["another hides it"]}
    assert levels == {"XID 62": "take out", "XID 154": "watch"}
