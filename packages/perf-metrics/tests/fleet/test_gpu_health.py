"""Which GPUs to take out: what is planted in a real Prometheus is found, with evidence, and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from perf_metrics import (
    FleetReport,
    GPUHealth,
    JobNames,
    PrometheusAPI,
    collect_fleet,
    collect_gpu_health,
    fleet_report,
)
from perf_metrics.fleet.xid_errors import xid_error

from .dcgm_series import CLOCK_NAME, MODEL, OLD_NAME
from .fleet_command import fleet_command, report_of, run
from .openmetrics_pieces import Pieces
from .prometheus_server import PrometheusServer
from .synthetic_plan import START_S

HOUR, STEP = 3600, 30
END_S = START_S + 8 * HOUR
JOBS = {"llama": (0, 2.5), "moe": (3, 5), "vit": (5.5, 8)}
"""Hours of the three jobs, which have the GPUs of node a one after the other."""
RENAMED_AT = START_S + 4 * HOUR

Value = Callable[[int], float]


def hours(first: float, last: float, *, host: str = "a") -> list[int]:
    """Unix times of scrapes; of node b there are none for ten minutes."""
    times = range(START_S + round(first * HOUR), START_S + round(last * HOUR), STEP)
    away = range(START_S + 6 * HOUR, START_S + 6 * HOUR + 600)
    return [time for time in times if host == "a" or time not in away]


def grows(at: float, by: float, *, start: float = 0.0) -> Value:
    return lambda time: start + (by if time >= START_S + at * HOUR else 0)


def last_xid(*events: tuple[float, int], start: int = 0) -> Value:
    """The gauge: the code of the last one."""
    return lambda time: ([start] + [code for at, code in events if time >= START_S + at * HOUR])[-1]


def restarted(time: int) -> float:
    """3, 4, then 0 and 1."""
    if time < RENAMED_AT:
        return 3 + (time > START_S + HOUR)
    return float(time > START_S + 7 * HOUR)


PLANTED: dict[tuple[str, int], dict[str, Value]] = {
    ("a", 1): {"DCGM_FI_DEV_XID_ERRORS": last_xid((2, 79))},
    ("a", 2): {"DCGM_FI_DEV_XID_ERRORS": last_xid((1, 13), (4, 31), (6, 13))},
    ("a", 3): {"DCGM_FI_DEV_XID_ERRORS": last_xid((3.25, 94), (4, 63))},
    ("a", 6): {"DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": grows(2.2, 5)},
    # It counts from 0 again after a restart of the driver; what stays does not, so that 0 is a bad reading.
    ("a", 0): {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": restarted},
    ("a", 7): {"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": restarted},
    ("b", 0): {
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": grows(5, 2),
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": grows(5.5, 1, start=7),
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL": grows(5.5, 1, start=7),
    },
    # Long before, and shown again after each time that the exporter was away.
    ("b", 1): {"DCGM_FI_DEV_XID_ERRORS": last_xid(start=48)},
    # With the power cap, which is usual.
    ("b", 2): {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": lambda time: 4 + (32 if time % HOUR < 900 else 0)},
    ("b", 3): {"DCGM_FI_DEV_ROW_REMAP_FAILURE": lambda time: 1},
    ("b", 4): {
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda time: max(0, time - START_S) // 60 * 20,
        # One bad reading, and a blank.
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": lambda time: (
            0 if START_S + 3 * HOUR <= time < START_S + 4 * HOUR else 7
        ),
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": lambda _: 9223372036854775794,
    },
    ("b", 5): {"DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda time: max(0, time - START_S) // 60 * 100},
    ("b", 6): {
        "DCGM_FI_DEV_XID_ERRORS": last_xid((7, 43)),
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": lambda _: 2,
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": lambda _: 4,
    },
    ("b", 7): {"DCGM_FI_DEV_XID_ERRORS": last_xid((7, 999))},
}


def write(folder: Path) -> Sequence[Path]:
    with Pieces(folder) as pieces:
        for host in "ab":
            for index in range(8):
                _write_gpu(pieces, host, index)
    return pieces.paths


def _write_gpu(pieces: Pieces, host: str, index: int) -> None:
    slow, lazy = (host, index) == ("a", 4), (host, index) == ("a", 5)
    for job, (first, last) in JOBS.items() if host == "a" else [("other", (0.0, 8.0))]:
        times = hours(first, last, host=host)
        odd = job != "vit"
        mhz = 900.0 if slow and odd else 1350.0
        activity = 0.55 * 1350 / mhz * (0.3 if lazy and odd else 1)
        for name, value in ((OLD_NAME, activity), (CLOCK_NAME, mhz)):
            pieces.write(name, _labels(host, index, job), _ms(times), [value] * len(times))
    for name, value in PLANTED.get((host, index), {}).items():
        # The node gets another name in the middle, and the label with it.
        for times, renamed in ((hours(-1, 4, host=host), False), (hours(4, 8, host=host), True)):
            values = [value(time) for time in times]
            pieces.write(name, _labels(host, index, None, renamed=renamed), _ms(times), values)


def _ms(times: Sequence[int]) -> list[int]:
    return [1000 * time for time in times]


def _labels(host: str, index: int, job: str | None, *, renamed: bool = False) -> str:
    labels = {
        "gpu": str(index),
        "UUID": f"GPU-{host}{index}",
        "modelName": MODEL,
        "hostname" if renamed else "Hostname": f"new-{host}" if renamed else host,
    }
    told = {**labels, **({} if job is None else {"hpc_job": job})}
    return ",".join(f'{name}="{value}"' for name, value in told.items())


@pytest.fixture(scope="module")
def server(prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    folder = tmp_path_factory.mktemp("health")
    server = PrometheusServer(folder / "prometheus")
    for path in write(folder):
        server.backfill(path)
    with server:
        yield server


@pytest.fixture(scope="module")
def report(server: PrometheusServer) -> FleetReport:
    api = PrometheusAPI(server.url)
    health = collect_gpu_health(api, START_S, END_S)
    # Each job is a run of its own name.
    names = JobNames(["hpc_job"], pattern=r"^(?P<run>\w+)$")
    return fleet_report(collect_fleet(api, START_S, END_S, names=names), health=health)


def of(report: FleetReport, gpu: str) -> GPUHealth:
    (found,) = (one for one in report.gpus if one.device.uuid == f"GPU-{gpu}")
    return found


def test_all_that_is_planted_is_found_and_nothing_else(report: FleetReport) -> None:
    found = {
        (one.device.uuid or "")[-2:]: {each.kind: each.level for each in one.evidence} for one in report.gpus
    }
    assert found == {
        "a0": {"uncorrectable ECC errors": "take out"},
        "a1": {"XID 79": "take out"},
        "a2": {"XID 13": "watch", "XID 31": "watch"},
        "a3": {"XID 94": "watch", "XID 63": "watch"},
        "a4": {"slow clock": "take out"},
        "a5": {"less work": "take out"},
        "a6": {"NVLink CRC errors in flits": "watch"},
        "a7": {"memory rows remapped after uncorrectable errors": "watch"},
        "b0": {"uncorrectable ECC errors": "take out", "NVLink replays": "take out"},
        "b1": {"XID 48": "watch"},
        "b2": {"thermal slowdown": "watch"},
        "b3": {"remapping of memory rows failed": "take out"},
        "b5": {"PCIe replays": "watch"},
        "b6": {"uncorrectable ECC errors": "take out", "XID 43": "note"},
        "b7": {"XID 999": "watch"},
    }


def test_those_that_cost_most_come_first(report: FleetReport) -> None:
    levels = [one.level for one in report.gpus]
    assert levels == sorted(levels, key=["take out", "watch", "note"].index)
    assert [(one.device.uuid or "")[-2:] for one in report.gpus][:3] == ["a4", "a5", "b0"]


def test_the_evidence_has_figures_times_and_jobs(report: FleetReport) -> None:
    slow = of(report, "a4").evidence[0]
    assert slow.jobs == ("llama", "moe")
    # All eight wait for it in 4.5 hours, for a third of the time.
    assert slow.lost_hours == pytest.approx(8 * 4.5 / 3, rel=0.01)
    lazy = of(report, "a5")
    assert lazy.lost_hours == pytest.approx(0.7 * 4.5, rel=0.01)
    assert (lazy.jobs, lazy.job_hours) == (3, pytest.approx(7, rel=0.01))
    fallen = of(report, "a1").evidence[0]
    assert fallen.jobs == ("llama",)
    assert fallen.first_s == pytest.approx(START_S + 2 * HOUR, abs=STEP)
    assert "fallen off the bus (NVIDIA: RESTART_BM), once, in llama" in fallen.text
    # 4 - 3, and 1 since it counts from 0 again.
    assert of(report, "a0").evidence[0].text.startswith("2 more")
    assert of(report, "a7").evidence[0].text.startswith("1 more")
    assert of(report, "b6").evidence[0].text == "2 in all, from before"
    replays = {one.kind: one.text for one in of(report, "b0").evidence}["NVLink replays"]
    assert replays == "1 more"
    (thermal,) = of(report, "b2").evidence
    assert thermal.text.startswith("for 1.8 h")  # a quarter of eight hours, ten minutes of which nobody saw
    assert "101.7 a minute" in of(report, "b5").evidence[0].text


def test_a_renamed_node_is_called_by_its_last_name(report: FleetReport) -> None:
    assert of(report, "b3").device.host == "new-b"
    assert "GPU 3" in str(of(report, "b3").device)


def test_what_the_exporter_does_not_have_is_told(report: FleetReport) -> None:
    (note,) = (note for note in report.notes if note.startswith("health of GPUs"))
    assert "DCGM_FI_DEV_ROW_REMAP_PENDING" in note
    assert "DCGM_FI_DEV_XID_ERRORS" not in note


def test_the_command_tells_it_in_text_and_json(server: PrometheusServer, tmp_path: Path) -> None:
    options = ["--prometheus", server.url, "--start", str(START_S), "--end", str(END_S)]
    done = run(fleet_command(*options))
    assert "GPUs to look at (15)" in done.stdout
    assert (
        "take out: a, GPU 4 (GPU-a4), 12.0 GPU hours lost\n  - slow clock: in 2 of its 3 jobs" in done.stdout
    )
    assert max(map(len, done.stdout.split("GPUs to look at")[1].splitlines()[:20])) <= 100
    assert "fallen off the bus (NVIDIA: RESTART_BM)" in done.stdout
    gpus = report_of(fleet_command(*options), tmp_path)["gpus"]
    assert [gpu["uuid"] for gpu in gpus][:2] == ["GPU-a4", "GPU-b0"]
    assert gpus[0]["evidence"][0]["jobs"] == ["llama", "moe"]


def test_a_selector_holds_for_health_too(server: PrometheusServer) -> None:
    health = collect_gpu_health(PrometheusAPI(server.url), START_S, END_S, selector='UUID=~"GPU-a.*"')
    assert {(uuid or "")[:5] for uuid, *_ in health.devices} == {"GPU-a"}
    assert health.values["NVLink CRC errors in flits"]


@pytest.mark.parametrize("later", [0, 1, 7, 11, 29.3, 1799.999, 3599])
def test_a_range_may_end_at_any_time(server: PrometheusServer, later: float) -> None:
    """The last window is there, whatever the range is divided into: the range ends in the middle of it."""
    end = START_S + 5 * HOUR + 1200 + later
    health = collect_gpu_health(PrometheusAPI(server.url), START_S + 0.7, end)
    grown = health.values["uncorrectable ECC errors"]["GPU-b0", None, None]
    assert max(grown.values()) == 2
    assert max(grown) == pytest.approx(end, abs=1e-3)


def test_a_range_without_a_step_is_refused(server: PrometheusServer) -> None:
    with pytest.raises(ValueError, match="must be a step of 30 s before"):
        collect_gpu_health(PrometheusAPI(server.url), START_S, START_S + 5)


def test_without_counters_of_health_work_and_clocks_are_judged(server: PrometheusServer) -> None:
    alone = fleet_report(collect_fleet(PrometheusAPI(server.url), START_S, END_S)).gpus
    # Of two jobs whose runs are not known, the work may be uneven in the same way.
    assert {(one.device.uuid or "")[-2:]: one.level for one in alone} == {"a4": "take out", "a5": "watch"}


def test_the_catalogue_knows_what_is_whose() -> None:
    assert xid_error(79).meaning == "hardware"
    assert xid_error(31).meaning == "application"
    assert (xid_error(119).action, xid_error(145).action) == ("RESET_GPU", "WORKFLOW_NVLINK5_ERR")
    assert xid_error(0).meaning == "unknown"
