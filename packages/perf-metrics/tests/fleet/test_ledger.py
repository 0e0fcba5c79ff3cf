"""What GPU time was spent on: the ledger of a fleet equals what was planted, and adds up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from perf_metrics import (
    Device,
    FleetReport,
    FleetSamples,
    JobNames,
    PrometheusAPI,
    collect_fleet,
    collect_unallocated,
    fleet_report,
    report_as_html,
    report_as_text,
)
from perf_metrics.fleet.job_identity import JobIdentity

from .dcgm_series import CLOCK_NAME, MODEL, NEW_NAME, OLD_NAME
from .fleet_command import fleet_command, report_of, run
from .openmetrics_pieces import Pieces
from .prometheus_server import PrometheusServer
from .synthetic_plan import START_S

STEP_S, MINUTES = 30.0, 60
WORK, SAVE, NOTHING = 0.5, 0.01, 0.0


def report_of_minutes(
    *stretches: tuple[float, float],
    slow_mhz: float | None = None,
    start: float = 600.0,
    names: JobNames | None = None,
) -> FleetReport:
    """A job on four GPUs with tensor activity for so many minutes each; None is a gap."""
    fleet = FleetSamples(0.0, 6 * 3600.0, STEP_S, names=names)
    time = start
    for minutes, activity in stretches:
        for _ in range(round(minutes * 60 / STEP_S)):
            time += STEP_S
            for index in range(4):
                mhz = slow_mhz if slow_mhz is not None and index == 3 else 1350.0
                if not math.isnan(activity):
                    device = Device("n", str(index), f"GPU-{index}", MODEL)
                    fleet.add("job", device, time, activity * 1350 / mhz, mhz)
    return fleet_report(fleet)


def minutes(report: FleetReport) -> dict[str, float]:
    """Minutes of each GPU by kind, without those of none."""
    return {kind: hours * MINUTES / 4 for kind, hours in report.jobs[0].hours.items() if hours}


def test_each_minute_of_a_job_has_one_kind() -> None:
    report = report_of_minutes((5, NOTHING), (60, WORK), (3, SAVE), (60, WORK), (10, NOTHING))
    assert minutes(report) == pytest.approx({"starting": 5, "working": 120, "stalled": 3, "idle": 10})
    assert sum(report.hours.values()) == pytest.approx(report.device_hours)


def test_a_restart_is_a_start_again() -> None:
    """Half an hour away, then six minutes before it works; a scrape that failed is nothing of that."""
    nan = math.nan
    restarted = report_of_minutes((60, WORK), (30, nan), (6, NOTHING), (60, WORK))
    assert minutes(restarted) == pytest.approx({"working": 120, "starting": 6})
    missed = report_of_minutes((60, WORK), (1, nan), (6, NOTHING), (60, WORK))
    assert minutes(missed) == pytest.approx({"working": 120, "stalled": 6})


def test_what_began_before_the_range_does_not_start_in_it() -> None:
    assert minutes(report_of_minutes((6, SAVE), (60, WORK), start=0.0)) == pytest.approx(
        {"stalled": 6, "working": 60}
    )


def test_a_job_that_does_nothing_is_idle() -> None:
    assert minutes(report_of_minutes((60, NOTHING))) == pytest.approx({"idle": 60})
    assert minutes(report_of_minutes((60, 0.0004))) == pytest.approx({"idle": 60})


def test_a_job_that_waits_for_most_of_its_time_is_stalled() -> None:
    often = [part for _ in range(12) for part in ((2.0, WORK), (8.0, SAVE))]
    assert minutes(report_of_minutes(*often)) == pytest.approx({"working": 24, "stalled": 88, "idle": 8})


def test_a_job_that_hardly_works_works_and_one_that_hums_does_not() -> None:
    """Seven percent of the time, beside nothing, and beside next to nothing."""
    for rest in (NOTHING, 0.004):
        report = report_of_minutes((10, WORK), (140, rest), (10, WORK), (100, rest), start=0.0)
        assert minutes(report) == pytest.approx({"working": 20, "stalled": 140, "idle": 100})


def test_a_job_that_still_runs_at_the_end_of_the_range_is_not_idle_yet() -> None:
    saving = report_of_minutes((340, WORK), (10, SAVE))
    assert minutes(saving) == pytest.approx({"working": 340, "stalled": 10})
    loading = report_of_minutes((10, NOTHING), start=350 * 60.0)
    assert minutes(loading) == pytest.approx({"starting": 10})
    for_long = report_of_minutes((320, WORK), (30, NOTHING))
    assert minutes(for_long) == pytest.approx({"working": 320, "idle": 30})


def test_time_without_a_figure_is_unknown() -> None:
    fleet = FleetSamples(0.0, 6 * 3600.0, STEP_S)
    for step in range(120):
        fleet.add("job", Device("n", "0", "GPU-0", "NVIDIA Unheard Of"), 600 + STEP_S * step, 0.5, 1350.0)
    (job,) = fleet_report(fleet).jobs
    assert job.hours == pytest.approx({**dict.fromkeys(job.hours, 0.0), "unknown": 1.0})


def test_what_a_slow_gpu_costs_all_of_them() -> None:
    report = report_of_minutes((60, WORK), slow_mhz=900.0)
    assert minutes(report) == pytest.approx({"working": 40, "low clock": 20})


def test_a_slow_gpu_is_compared_with_its_own_model() -> None:
    """Eight of one model have a high clock; of four others, one has less than those three."""
    fleet = FleetSamples(0.0, 6 * 3600.0, STEP_S)
    for step in range(120):
        for index in range(12):
            other = index >= 8
            mhz = 1000.0 if index == 11 else 1250.0 if other else 1700.0
            model = "NVIDIA A100-SXM4-80GB" if other else MODEL
            activity = 0.4 * 1250 / mhz if other else 0.4
            fleet.add("job", Device("n", str(index), f"GPU-{index}", model), 600 + 30 * step, activity, mhz)
    report = fleet_report(fleet)
    assert report.hours["low clock"] == pytest.approx(12 * 0.2)
    assert report.gpus[0].lost_hours == pytest.approx(12 * 0.2)


def test_the_text_has_hours_shares_and_costs() -> None:
    report = report_of_minutes((30, NOTHING), (90, WORK))
    text = report_as_text(report, price=2.0)
    assert "What GPU time was spent on" in text
    assert " ".join(
        next(line for line in text.splitlines() if line.startswith("starting")).split()
    ).startswith("starting 2.0 25.0% 4.00")
    assert "unallocated" not in text  # which nobody asked for


def test_users_have_their_own_ledger() -> None:
    names = JobNames(["hpc_job"], slurm={"job": JobIdentity("job", user="ana")})
    names.name_of({"hpc_job": "job"})
    (user,) = report_of_minutes((30, NOTHING), (90, WORK), names=names).users
    assert user.hours_without_work == pytest.approx(2)
    assert user.hours["working"] == pytest.approx(6)


def plant(folder: Path) -> Sequence[Path]:
    """A job of an hour on GPU 0 and one on a slice of GPU 1; GPUs 2 and 3 have none, in three hours."""
    with Pieces(folder) as pieces:
        _write(pieces, "GPU-0", 0.0, 1.0, job="a")
        _write(pieces, "GPU-0", 1.0, 3.0)
        _write(pieces, "GPU-1", 0.0, 3.0)  # the whole GPU, whose slices count
        _write(pieces, "GPU-1", 0.0, 2.0, job="b", slice_id="1")
        _write(pieces, "GPU-1", 2.0, 3.0, slice_id="1")
        _write(pieces, "GPU-1", 0.0, 3.0, slice_id="2")
        _write(pieces, "GPU-2", 0.0, 3.0, names=(OLD_NAME, NEW_NAME))
        _write(pieces, "GPU-3", 0.0, 1.5, host="old")
        _write(pieces, "GPU-3", 1.5, 3.0, host="new")
    return pieces.paths


def _write(
    pieces: Pieces,
    uuid: str,
    first: float,
    last: float,
    *,
    job: str = "",
    slice_id: str = "",
    host: str = "n",
    names: Sequence[str] = (OLD_NAME,),
) -> None:
    start, end = (START_S + round(hour * 3600) for hour in (first, last))
    times = [1000 * time for time in range(start + 30, end + 30, 30)]
    told = {
        "UUID": uuid,
        "gpu": uuid[-1],
        "Hostname": host,
        "modelName": MODEL,
        "hpc_job": job,
        "GPU_I_ID": slice_id,
        "GPU_I_PROFILE": "3g.40gb" if slice_id else "",
    }
    labels = ",".join(f'{name}="{value}"' for name, value in told.items() if value)
    for name in names:
        pieces.write(name, labels, times, [0.4 if job else 0.0] * len(times))
    pieces.write(CLOCK_NAME, labels, times, [1350.0] * len(times))


def test_gpus_without_a_job_are_counted_once(
    prometheus_server: Callable[..., PrometheusServer], tmp_path: Path
) -> None:
    server = prometheus_server()
    for path in plant(tmp_path):
        server.backfill(path)
    end = START_S + 3 * 3600
    with server:
        api = PrometheusAPI(server.url)
        # Two of GPU 0, one and three of the slices of GPU 1, three of GPU 2 and of GPU 3. A job that ends
        # counts for two and a half scrapes longer.
        late = 75 / 3600
        free = collect_unallocated(api, START_S, end)
        assert free == pytest.approx(2 + 1 + 3 + 3 + 3, abs=2 * late)
        one = collect_unallocated(api, START_S, end, selector='UUID="GPU-1",')  # a comma too many
        assert one == pytest.approx(4, abs=late)
        # The step need not be the scrape interval.
        for step_s in (15, 60):
            assert collect_unallocated(api, START_S, end, step_s=step_s) == pytest.approx(free, abs=0.2)
        report = fleet_report(collect_fleet(api, START_S, end), unallocated_hours=free)
        assert sum(report.hours.values()) == pytest.approx(15, abs=2 * late)
        ofu = 0.4 * 1350 / 1830
        assert report.ofu_of_all_hours == pytest.approx(ofu * 3 / 15, rel=0.01)
        command = fleet_command("--prometheus", server.url, "--start", str(START_S), "--end", str(end))
        told = report_of(command, tmp_path)["fleet"]
        assert told["hours"] == pytest.approx(dict(report.hours))
        assert "unallocated" in run(command).stdout
    page = report_as_html(report)
    assert "GPUs that no job has" in page
