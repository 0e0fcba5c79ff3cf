"""Large jobs that are requeued and renamed, in Slurm and as JobSets, in a real Prometheus server."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf_metrics import FleetSamples, fleet_report, report_as_json
from perf_metrics.ofu.samples import Device

from .fleet_command import fleet_command, report_of
from .prometheus_server import PrometheusServer
from .synthetic_large import LargeFleet
from .synthetic_large_check import compared
from .synthetic_large_plan import LargeSize, Style

pytestmark = pytest.mark.xdist_group("fleet")

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def served(
    prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LargeFleet, PrometheusServer]]:
    folder = tmp_path_factory.mktemp("large")
    fleet = LargeFleet(LargeSize(gpus=256, days=0.25))
    server = PrometheusServer(folder / "prometheus")
    fleet.write_sacct(folder / "sacct.json")
    for path in fleet.pieces(folder):
        server.backfill(path)
    with server:
        yield fleet, server


def report_on(served: tuple[LargeFleet, PrometheusServer], style: Style, folder: Path) -> dict[str, Any]:
    fleet, server = served
    times = ("--start", str(fleet.start_s), "--end", str(fleet.end_s))
    sacct = str(server.folder.parent / "sacct.json")
    named = ("--sacct", sacct) if style == "slurm" else ("--job-label", "pod", "--kube-labels")
    return report_of(fleet_command("--prometheus", server.url, *times, *named), folder)


@pytest.mark.parametrize("style", ["slurm", "jobsets"])
def test_all_that_is_planted_is_found_and_nothing_beside(
    served: tuple[LargeFleet, PrometheusServer], style: Style, tmp_path: Path
) -> None:
    truth = served[0].of_style(style)
    found = {one.what: one for one in compared(report_on(served, style, tmp_path), truth, served[0].errors)}
    assert len(truth) == 7
    assert [(one.found, one.beside) for one in found.values()] == [
        (one.planted, 0) for one in found.values()
    ], found
    assert found["OFU fell within the job"].planted == 1
    assert found["OFU fell against earlier jobs of the run"].planted == (1 if style == "slurm" else 0)
    assert found["odd devices"].planted == 1
    assert found["GPUs with errors"].planted == 2
    assert found["GPUs at a time"].error == 0
    assert found["mean OFU of a job, relative"].error == pytest.approx(0, abs=1e-9)
    for what in ("GPU hours of a job", "GPU hours of a user"):
        assert found[what].error == pytest.approx(0, abs=1e-9), what
    assert 0 <= (found["time of these, in scrapes"].error or 0) <= 1


def test_the_fleet_has_what_real_ones_do(served: tuple[LargeFleet, PrometheusServer]) -> None:
    """Jobs that change hosts, GPUs under several hosts, label names, exporters and pods, blanks, outages."""
    fleet, server = served
    moving = [job for job in fleet.jobs if len({place.hosts for place in job.allocations}) > 1]
    assert {job.style for job in moving} == {"slurm", "jobsets"}

    def several(label: str, matchers: str) -> int:
        query = f"count(count by (UUID) (count by (UUID, {label}) (last_over_time({{{matchers}}}[1d]))) > 1)"
        (answer,) = server.query(query, fleet.end_s)
        return int(answer["value"][1])

    activity = '__name__=~"DCGM_FI_PROF_.*"'
    for label in ("Hostname", "hostname", "instance", "__name__", "pod", "hpc_job"):
        assert several(label, activity) > 0, label
    job = next(job for job in fleet.jobs if job.style == "jobsets" and job.renamed_at is not None)
    pods = server.query(
        f'last_over_time(kube_pod_labels{{label_jobset_sigs_k8s_io_jobset_name="{job.name.split("/")[1]}"}}[1d])',
        fleet.end_s,
    )
    assert len({series["metric"]["pod"] for series in pods}) > len(job.allocations[0].hosts)


def test_a_size_without_room_for_the_jobs_is_refused() -> None:
    for size in ({"gpus": 100}, {"gpus": 128}, {"gpus": 256, "days": 0.1}, {"gpus": 256, "jobsets": 2.0}):
        with pytest.raises(ValueError, match="16 hosts of each style or none"):
            LargeSize(**size)  # type: ignore[arg-type]


def samples(seed: int) -> list[tuple[float, float | None, float | None]]:
    """Samples in the order of their times, of which some are blank and some cannot be true."""
    chance = random.Random(seed)
    shares = [None, 0.0, 0.3, 0.9, 1.0, 1.005, 1.02, 45.0]
    clocks = [None, 0.0, 20.0, 1350.0, 1830.0, 1980.0, 2100.0, 9000.0]
    weights = [1, 1, 20, 20, 2, 1, seed % 3, 40 * (seed % 2)]
    return [
        (30.0 * step, *(chance.choices(kind, weights)[0] for kind in (shares, clocks)))
        for step in range(200)
        if chance.random() > 0.1
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", [H100, "Unheard Of 9000"])
def test_series_are_taken_as_their_samples_one_by_one(seed: int, model: str) -> None:
    one, other = (FleetSamples(start=0, end=6000, step_s=30) for _ in range(2))
    rows, device = samples(seed), Device("node", "0", "uuid", model)
    columns = [np.array(column, float) for column in zip(*rows, strict=True)]  # None becomes NaN
    # In parts, the last of them with what is there already.
    for part in (slice(0, 50), slice(50, 200), slice(40, 60)):
        for row in rows[part]:
            one.add("job", device, *row)
        other.add_series("job", device, *(column[part] for column in columns))
    assert other.jobs == one.jobs
    assert (other.unknown_models[model] > 0) == (one.unknown_models[model] > 0)
    for wrong, refused in one.refused.items():
        assert other.refused[wrong].example == refused.example
    assert report_as_json(fleet_report(other))["jobs"] == report_as_json(fleet_report(one))["jobs"]


def test_a_series_that_is_negative_or_infinite_is_refused() -> None:
    fleet = FleetSamples(start=0, end=60, step_s=30, tensor_mhz=1000)
    for activity, mhz in ((-0.1, 900.0), (0.1, -1.0), (float("inf"), 900.0)):
        with pytest.raises(ValueError, match="must be"):
            fleet.add_series("job", Device("node"), np.array([0.0]), np.array([activity]), np.array([mhz]))


def test_a_host_without_numpy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetSamples(start=0, end=60, step_s=30, tensor_mhz=1000)
    fleet.add("job", Device("node"), 30.0, 0.5, 900)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'perf-metrics\[prometheus\]'"):
        fleet_report(fleet)


def test_runs_leave_the_samples_of_the_fleet_as_they_are() -> None:
    """A GPU that two sets of labels name in one run is joined in the run, and not in the fleet."""
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(100):
        labels = () if step < 50 else (("image", "b"),)
        fleet.add("job", Device("node", "0", "uuid"), 30.0 * step, 0.5, 900, labels)
    for _ in range(2):
        (run,) = fleet.runs()["job"].values()
        assert [len(kept.times) for kept in run.devices.values()] == [100]
        assert [len(kept.times) for kept in fleet.jobs["job"].devices.values()] == [50, 50]
