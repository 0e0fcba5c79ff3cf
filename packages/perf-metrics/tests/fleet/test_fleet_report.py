import json

import pytest

from perf_metrics import (
    Application,
    FleetReport,
    FleetSamples,
    JobFacts,
    OutlierRule,
    fleet_report,
    report_as_json,
    report_as_text,
)
from perf_metrics.fleet.app_metrics import Pair
from perf_metrics.ofu.samples import Device


def fleet_of(levels: dict[str, float], minutes: int = 40) -> FleetSamples:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    for number, (job, level) in enumerate(levels.items()):
        for step in range(2 * minutes):
            for gpu in "01":
                fleet.add(job, Device(f"node-{number}", gpu), 3600 * number + 30 * step + 600, level, 1000)
    return fleet


@pytest.fixture(scope="module")
def report() -> FleetReport:
    applications = {
        "sound": Application(0.39, gpus=512),
        "recomputing": Application(0.30, facts=JobFacts(experts=False)),
        "experts": Application(0.54),
        "gone": Application(0.2),
    }
    levels = {"sound": 0.40, "recomputing": 0.40, "experts": 0.2558, "silent": 0.3}
    return fleet_report(fleet_of(levels), applications)


def test_outliers_have_candidates_and_the_sound_have_none(report: FleetReport) -> None:
    assert [job.figures.job for job in report.outliers] == ["experts", "recomputing"]
    candidates = {job.figures.job: [one.name for one in job.candidates] for job in report.jobs}
    assert candidates["recomputing"] == ["recomputation not counted"]
    assert "latent experts counted at full width" in candidates["experts"]
    assert candidates["sound"] == candidates["silent"] == []


def test_jobs_without_their_other_half_are_named(report: FleetReport) -> None:
    assert report.notes == (
        "1 jobs report MFU and have no counters in this time: gone",
        "1 jobs have counters and report no MFU: silent",
    )
    assert report.agreement is not None
    assert report.agreement.jobs == 3


def test_gpus_are_those_of_the_application_or_those_seen(report: FleetReport) -> None:
    assert [job.gpus for job in report.jobs] == [512, 2, 2, 2]


def test_the_json_is_plain_and_the_text_has_the_findings(report: FleetReport) -> None:
    data = json.loads(json.dumps(report_as_json(report), allow_nan=False))
    assert data["fleet"] == {
        "jobs": 4,
        "devices": 8,
        "device_hours": pytest.approx(4 * 2 * 80 * 30 / 3600),
        "samples": 4 * 2 * 80,
        "ofu_mean": pytest.approx((0.4 + 0.4 + 0.2558 + 0.3) / 4),
        "mfu_share": 0.75,
        "unallocated_hours": None,
        "ofu_of_all_hours": None,
        "hours": {
            "working": pytest.approx(4 * 2 * 80 * 30 / 3600),
            **dict.fromkeys(("low clock", "stalled", "starting", "idle", "unknown"), 0.0),
        },
    }
    assert data["jobs"][0]["start"] == "1970-01-01T00:10:00Z"
    assert data["outliers"] == ["experts", "recomputing"]
    text = report_as_text(report)
    assert "recomputing     2   30.0   40.0  -10.0 (± 0.0)     0.75  recomputation not counted" in text


def test_a_job_that_slowed_down_alike_in_mfu_and_ofu_is_a_regression() -> None:
    fleet = fleet_of({"job": 0.40})
    for step in range(80):
        fleet.add("job", Device("node-0", "0"), 600 + 40 * 60 + 30 * step, 0.25, 1000)
    report = fleet_report(fleet, {"job": Application(0.35)})
    (fall,) = report.regressions
    assert (fall.job, fall.kind, fall.time_s) == ("job", "within the job", 600 + 40 * 60)
    (job,) = report.jobs
    assert not job.outlier
    assert "tensor cores wait" in [one.name for one in job.candidates]


def test_where_a_job_told_its_mfu_is_where_ofu_is_compared() -> None:
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=1000)
    for step in range(120):
        fleet.add("job", Device("node", "0"), 30 * step, 0.0 if step < 40 else 0.42, 1000)
    told = frozenset(float(30 * step) for step in range(40, 120))
    (job,) = fleet_report(fleet, {"job": Application(0.42, times=told)}).jobs
    assert job.pair is not None
    assert (job.pair.ofu, job.outlier) == (pytest.approx(0.42), False)
    (job,) = fleet_report(fleet, {"job": Application(0.42)}).jobs
    assert job.outlier


def test_restarts_that_crash_and_their_first_minutes_are_no_past() -> None:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    levels = {
        "a": (120, 0.38),
        "b": (120, 0.38),
        "crash": (8, 0.015),
        "slow": (120, 0.23),
        "sound": (120, 0.38),
    }
    for number, (name, (steps, level)) in enumerate(levels.items()):
        for step in range(steps):
            loading = step < 15
            fleet.add(name, Device("node", "0"), 7200.0 * number + 30 * step, 0.0 if loading else level, 1000)
    report = fleet_report(fleet, {name: Application(None, run="run") for name in levels})
    found = [one.job for one in report.regressions if one.kind == "against earlier jobs of the run"]
    assert found == ["slow"]


def test_a_clock_that_cannot_be_right_is_refused_and_counted() -> None:
    hot = FleetSamples(start=0, end=60, step_s=30, tensor_mhz=500)
    hot.add("job", Device("node", "0"), 30, 1.0, 1000)
    report = fleet_report(hot, {"job": Application(0.4)})
    assert report.notes[0] == (
        "1 samples of 1 jobs have an OFU above 100 %; is the tensor clock theirs (--tensor-mhz)? They are "
        "left out, such as 200.0%, of job"
    )
    assert (report.ofu_mean, report.jobs[0].figures.left_out, report.jobs[0].candidates) == (None, 1, ())


def test_names_cannot_take_over_the_terminal() -> None:
    report = fleet_report(fleet_of({"job\x1b[2J\n" + "x" * 100: 0.4}))
    text = report_as_text(report)
    assert "\x1b" not in text
    assert "job?[2J?xxx" in text


def test_a_report_of_nothing_says_so() -> None:
    report = fleet_report(FleetSamples(start=0, end=60, step_s=30))
    assert "0 jobs on 0 devices" in report_as_text(report)
    assert json.dumps(report_as_json(report), allow_nan=False)
    assert (report.ofu_mean, report.agreement, report.buckets) == (None, None, ())


@pytest.mark.parametrize(
    ("mfu", "ofu", "is_one"),
    [
        (0.40, 0.31, True),  # 9 points, and a quarter more
        (0.60, 0.51, False),  # 9 points of many
        (0.60, 0.49, True),
        (0.04, 0.02, False),  # twice, but 2 points
        (0.20, 0.26, True),
    ],
)
def test_the_rule_for_outliers(mfu: float, ofu: float, is_one: bool) -> None:
    assert OutlierRule().holds(Pair(mfu, ofu, 8)) is is_one


def test_a_rule_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"points=0 must be 0 to 100"):
        OutlierRule(points=0)
    with pytest.raises(ValueError, match="ratio=1 must be above 1"):
        OutlierRule(ratio=1)


def test_fp4_work_is_judged_by_the_peaks_of_the_jobs_own_devices() -> None:
    """Against BF16 it is 4 on a B200 and 6 on a B300."""
    facts = JobFacts(compute_dtype="fp4", peak_dtype="bf16")
    found = {}
    for model in ("NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA Unheard Of"):
        fleet = FleetSamples(0.0, 7200.0, 30.0, tensor_mhz=1850.0)
        for step in range(120):
            fleet.add("job", Device("n", "0", "GPU-0", model), 600 + 30 * step, 0.4, 925.0)
        (job,) = fleet_report(fleet, {"job": Application(mfu=0.8, facts=facts)}).jobs
        found[model] = [one.expected for one in job.candidates if one.name.startswith("fp4 work")]
    assert found == {
        "NVIDIA B200": [(4.0, 4.0)],
        "NVIDIA B300 SXM6 AC": [],
        "NVIDIA Unheard Of": [(4.0, 6.0)],
    }
