"""`perf-metrics fleet` on a fleet whose truth is known, in a real Prometheus server."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from .fleet_command import ServedFleet, report_of
from .planted import FALLEN
from .synthetic_plan import SCRAPE_S
from .synthetic_truth import Figures, JobTruth, Truth

pytestmark = pytest.mark.xdist_group("fleet")

Report = dict[str, Any]
SAME = 1e-9
"""Relative. A query with The scrape interval as its step sees each sample once, whatever the offset of the
host, as its windows of 30 s touch and do not overlap; Prometheus gives back the very double that was written.
So only the order of a sum can differ."""
LATE = 0.03
"""Relative, where scrapes come up to 2 s late across the edge of a step: two samples fall into one window and
none into the next, so that up to a quarter is not seen. Which ones is chance, but a stall of minutes counts
for much in a job of an hour."""


@pytest.fixture(scope="module")
def truth(small_fleet: ServedFleet) -> Truth:
    return small_fleet.fleet.truth


@pytest.fixture(scope="module")
def report(small_fleet: ServedFleet, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(small_fleet.with_mfu(), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def jobs(report: Report) -> dict[str, Report]:
    return {job["job"]: job for job in report["jobs"]}


def test_every_job_has_the_ofu_of_its_samples(truth: Truth, jobs: dict[str, Report]) -> None:
    assert set(jobs) == set(truth.jobs)
    for name, true in truth.jobs.items():
        told = jobs[name]["ofu"]
        assert told["mean"] == pytest.approx(true.mean, rel=SAME if true.exact else LATE), name
        if true.exact:
            tenths = quantiles(true.ofu, n=10, method="inclusive")
            assert [told["p10"], told["p50"], told["p90"]] == pytest.approx(tenths[::4], rel=SAME), name
            assert jobs[name]["samples"] == len(true.ofu), name


def test_with_half_the_step_late_scrapes_are_all_seen(
    small_fleet: ServedFleet, truth: Truth, tmp_path: Path
) -> None:
    """No two of them fall into 15 s. Of jobs that the start cuts, it sees one sample less."""
    report = report_of(small_fleet.command("--step", "15"), tmp_path)
    means = {job["job"]: (job["samples"], job["ofu"]["mean"]) for job in report["jobs"]}
    whole = [job for job in truth.jobs.values() if job.first_s > truth.start_s]
    assert any(not job.exact for job in whole)
    for job in whole:
        # A sample stands for the time around it, which is uneven where scrapes are late.
        mean = pytest.approx(job.mean, rel=SAME if job.exact else 5e-3)
        assert means[job.name] == (len(job.ofu), mean), job.name


def test_every_job_has_its_devices_and_times(truth: Truth, jobs: dict[str, Report]) -> None:
    for name, true in truth.jobs.items():
        means = [ofu for ofu, _, _ in true.devices.values()]
        imbalance = (max(means) - min(means)) / (sum(means) / len(means))
        assert (jobs[name]["devices"], jobs[name]["gpus"]) == (len(means), true.plan.gpus), name
        if true.exact:
            assert jobs[name]["imbalance"] == pytest.approx(imbalance, rel=1e-6), name
        for told, first_s in ((jobs[name]["start"], true.first_s), (jobs[name]["end"], true.last_s)):
            # Points of a query lie on whole steps, at most one after the sample that they show.
            assert 0 <= datetime.fromisoformat(told).timestamp() - first_s <= 2 * SCRAPE_S, name


def test_the_fleet_is_all_devices_with_a_job_each_counted_once(truth: Truth, report: Report) -> None:
    exact = {device for job in truth.jobs.values() for device in job.devices}
    late = sum(len(job.ofu) for job in truth.jobs.values() if not job.exact)
    assert (report["fleet"]["jobs"], report["fleet"]["devices"]) == (60, len(exact))
    assert truth.samples - late / 2 < report["fleet"]["samples"] < truth.samples
    # Late ones are fewer, so that they have less weight.
    assert report["fleet"]["ofu_mean"] == pytest.approx(truth.ofu_mean, rel=0.01)
    # Two jobs share two devices for 20 minutes, which are 40 minutes of devices and not 80.
    hours = sum(job["device_hours"] for job in report["jobs"])
    assert report["fleet"]["device_hours"] == pytest.approx(hours - 40 / 60, abs=0.05)


def test_agreement_is_that_of_the_truth(truth: Truth, report: Report, jobs: dict[str, Report]) -> None:
    everything = report["agreement"]["all"]
    for name, true in vars(truth.figures).items():
        assert everything[name] == pytest.approx(true, rel=5e-3), name
    buckets = {int(bucket["gpus"]): bucket for bucket in report["agreement"]["buckets"]}
    assert set(buckets) == set(truth.by_gpus)
    late = {job.plan.gpus for job in truth.jobs.values() if not job.exact}
    exact = set(buckets) - late
    assert len(exact) >= 6
    for gpus in exact:
        _assert_same(buckets[gpus], truth.by_gpus[gpus])


def _assert_same(told: Report, true: Figures) -> None:
    for name, value in vars(true).items():
        assert told[name] == (None if value is None else pytest.approx(value, rel=1e-6)), name


def test_planted_mistakes_are_the_first_candidate_or_tie_with_it(
    truth: Truth, jobs: dict[str, Report]
) -> None:
    """First where ratio and facts leave no other; else within the same distance of the ratio as the first."""
    planted = {name: job.plan.mistake for name, job in truth.jobs.items() if job.plan.mistake is not None}
    assert len(planted) == 14
    for name, mistake in planted.items():
        candidates = jobs[name]["candidates"]
        names = [candidate["name"] for candidate in candidates]
        if mistake.alone:
            assert names[0] == mistake.cause, name
        else:
            found = candidates[names.index(mistake.cause)]
            assert found["distance"] == pytest.approx(candidates[0]["distance"], abs=1e-9), name


def test_outliers_are_those_of_the_truth(truth: Truth, report: Report, jobs: dict[str, Report]) -> None:
    expected = {name for name, job in truth.jobs.items() if job.is_outlier}
    assert {name for name, job in truth.jobs.items() if job.plan.mistake is not None} < expected
    assert set(report["outliers"]) == expected
    quiet = set(jobs) - expected - {one["job"] for one in report["regressions"]}
    assert [name for name in quiet if jobs[name]["candidates"]] == []


def test_a_fall_within_a_job_and_a_slower_restart_are_found_and_nothing_else(
    truth: Truth, report: Report, jobs: dict[str, Report]
) -> None:
    expected = {(name, kind) for name, job in truth.jobs.items() for kind in job.regressions}
    assert {kind for _, kind in expected} == {"within the job", "against earlier jobs of the run"}
    assert {(one["job"], one["kind"]) for one in report["regressions"]} == expected
    assert {name for name, job in jobs.items() if job["drops"]} == {
        name for name, kind in expected if kind == "within the job"
    }
    for name, _ in expected:
        # As its MFU fell too, the count is right, and something holds the tensor cores up.
        assert jobs[name]["candidates"][0]["name"] == FALLEN


def test_falls_are_dated_and_measured(truth: Truth, jobs: dict[str, Report]) -> None:
    falls = {name: job.fall for name, job in truth.jobs.items() if job.fall is not None}
    assert len(falls) == 2
    for name, fall in falls.items():
        (drop,) = jobs[name]["drops"]
        # The first point of a query at the lower level is within a step after the first such sample.
        assert 0 <= datetime.fromisoformat(drop["time"]).timestamp() - fall.time_s <= SCRAPE_S, name
        assert (drop["before"], drop["after"]) == pytest.approx((fall.before, fall.after), rel=0.03), name


def test_a_slow_restart_is_held_against_the_median_of_the_earlier_jobs(truth: Truth, report: Report) -> None:
    run = sorted(
        (job for job in truth.jobs.values() if job.plan.run == "slower-after-restart"),
        key=lambda job: job.first_s,
    )
    (told,) = (one for one in report["regressions"] if one["kind"] == "against earlier jobs of the run")
    assert told["job"] == run[-1].name
    # Of each job its median, over which its start does not count.
    assert told["before"] == pytest.approx(sorted(median(job.ofu) for job in run[:-1])[1], rel=LATE)
    assert told["after"] == pytest.approx(median(run[-1].ofu), rel=LATE)


def test_a_straggler_and_a_gpu_with_less_work_are_found_and_nothing_else(
    truth: Truth, jobs: dict[str, Report]
) -> None:
    expected = {(name, *odd) for name, job in truth.jobs.items() for odd in job.odd_devices.items()}
    assert {kind for _, _, kind in expected} == {"slow clock", "less work"}
    found = {
        (name, odd["device"], odd["kind"]): odd for name, job in jobs.items() for odd in job["odd_devices"]
    }
    assert set(found) == expected
    for (name, device, _), odd in found.items():
        told = (odd["ofu"], odd["tensor_activity"], odd["sm_mhz"])
        true = truth.jobs[name]
        assert told == pytest.approx(true.devices[device], rel=SAME if true.exact else LATE)


UNTIDY: dict[str, Callable[[JobTruth], bool]] = {
    "MIG slices, whose GPU has the clock": lambda job: job.plan.slices and len(job.devices) == 3,
    "a GPU without a clock": lambda job: job.plan.without_clock is not None and len(job.devices) == 7,
    "blanks": lambda job: job.plan.blanks,
    "a gap": lambda job: job.plan.gap,
    "a device shared with another job": lambda job: job.plan.after is not None,
    "both names of tensor activity": lambda job: _hosts(job, "metric_names") == {"both"},
    "the new name": lambda job: _hosts(job, "metric_names") == {"new"},
    "hostname": lambda job: _hosts(job, "host_label") == {"hostname"},
    "Hostname": lambda job: _hosts(job, "host_label") == {"Hostname"},
}


def _hosts(job: JobTruth, attribute: str) -> set[str]:
    return {getattr(host, attribute) for host, _ in job.plan.places}


@pytest.mark.parametrize("what", UNTIDY)
def test_untidy_data_is_in_the_fleet_and_its_jobs_are_exact(
    what: str, truth: Truth, jobs: dict[str, Report]
) -> None:
    names = [name for name, job in truth.jobs.items() if UNTIDY[what](job) and job.exact]
    assert names
    for name in names:
        assert jobs[name]["ofu"]["mean"] == pytest.approx(truth.jobs[name].mean, rel=SAME)


def test_jobs_that_the_range_cuts_say_so(truth: Truth, jobs: dict[str, Report]) -> None:
    # Seen at the very first or the very last point: nobody can tell whether that was all of it. A job that
    # starts with the range has its first sample after that point.
    first_s, last_s = truth.start_s, truth.end_s - SCRAPE_S
    expected = {name for name, job in truth.jobs.items() if job.first_s <= first_s or last_s < job.last_s}
    assert len(expected) >= 2
    assert {name for name, job in jobs.items() if job["cut"]} == expected


def test_notes_count_what_is_blank_and_what_has_no_clock(report: Report) -> None:
    notes = "\n".join(report["notes"])
    for text in (
        "(blank)",
        "(not supported)",
        "have no SM clock beside",
        "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
    ):
        assert text in notes


def test_mfu_from_series_is_that_of_the_file(
    small_fleet: ServedFleet, truth: Truth, report: Report, tmp_path: Path
) -> None:
    told = report_of(small_fleet.command("--mfu-query", "training_mfu_ratio"), tmp_path)
    for job in told["jobs"]:
        # The mean of a job's series over its samples; where it is late or cut, not all of them are seen.
        assert job["mfu"] == pytest.approx(truth.jobs[job["job"]].mfu, rel=1e-9), job["job"]
    # OFU is compared where MFU was told: not in the minutes in which a node was not scraped.
    for name in ("jobs", "correlation", "mae_points", "within_10", "beyond_20"):
        assert told["agreement"]["all"][name] == pytest.approx(report["agreement"]["all"][name], rel=1e-2)
    assert any("training_mfu_ratio: 60 jobs tell MFU; 0 of them" in note for note in told["notes"])


def test_mfu_as_json_gives_the_same_report_as_csv(
    small_fleet: ServedFleet, report: Report, tmp_path: Path
) -> None:
    path = tmp_path / "mfu.json"
    with small_fleet.fleet.mfu_file.open(newline="") as lines:
        path.write_text(
            json.dumps([{key: text or None for key, text in row.items()} for row in csv.DictReader(lines)])
        )
    assert report_of(small_fleet.command("--mfu", str(path)), tmp_path) == report
