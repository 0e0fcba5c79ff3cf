"""Intervals in the report on a fleet: of OFU, of MFU - OFU and of falls; and samples that are too rare."""

from __future__ import annotations

import json
import logging
import math
from random import Random
from statistics import fmean, stdev

import pytest

from perf_metrics import (
    Application,
    FleetReport,
    FleetSamples,
    PrometheusAPI,
    collect_fleet,
    fleet_report,
    report_as_html,
    report_as_json,
    report_as_text,
)
from perf_metrics.fleet.regressions import JobLevel, find_drops, slower_than_earlier_jobs
from perf_metrics.ofu.samples import Device
from perf_metrics.student_t import t_quantile

LEVEL, AFTER, STEPS = 0.40, 0.30, 240


def wandering(random: Random, count: int, spread: float = 0.01) -> list[float]:
    """Noise whose neighbours are alike: correlation 0.8."""
    state, found = random.gauss(), []
    for _ in range(count):
        found.append(spread * state)
        state = 0.8 * state + 0.6 * random.gauss()
    return found


def add_job(fleet: FleetSamples, name: str, levels: list[float], *, start: float, step_s: float = 30) -> None:
    """Four GPUs that wait for one another."""
    random = Random(name)
    for place, (level, common) in enumerate(zip(levels, wandering(random, len(levels)), strict=True)):
        for gpu in "0123":
            activity = level + common + random.gauss(0, 0.003)
            fleet.add(name, Device(name, gpu), start + step_s * (place + 1), activity, 1000)


@pytest.fixture(scope="module")
def report() -> FleetReport:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    add_job(fleet, "steady", [LEVEL] * STEPS, start=600)
    add_job(fleet, "fell", [LEVEL] * STEPS + [AFTER] * STEPS, start=600)
    add_job(fleet, "short", [LEVEL] * 8, start=600)
    return fleet_report(fleet, {"steady": Application(0.42), "short": Application(0.42)})


def test_each_job_has_its_interval_or_the_reason_for_none(report: FleetReport) -> None:
    of = {job.figures.job: job.figures.interval for job in report.jobs}
    steady = of["steady"]
    assert steady is not None
    assert steady.mean == pytest.approx(
        next(j for j in report.jobs if j.figures.job == "steady").figures.ofu.mean
    )  # type: ignore[union-attr]
    assert steady.includes(LEVEL)
    assert steady.samples == STEPS  # not 4 x 240: the four GPUs are one series
    assert {name: one.reason for name, one in of.items() if one is not None} == {
        "steady": None,
        "fell": "the samples drift or step from one level to another, so that their mean tells no level",
        "short": "8 samples are too few for an interval, which takes 16",
    }


def test_jobs_without_an_interval_are_named_in_the_notes(report: FleetReport) -> None:
    text, page = report_as_text(report), report_as_html(report)
    for note in (
        "1 jobs have no interval for OFU, as the samples drift or step from one level to another, so that "
        "their mean tells no level: fell",
        "1 jobs have no interval for OFU, as it takes 16 steps with samples: short",
    ):
        assert f"- {note}\n" in f"{text}\n"
        assert f"<li>{note}</li>" in page


def test_the_interval_is_wider_than_that_of_independent_samples(report: FleetReport) -> None:
    (job,) = (one for one in report.jobs if one.figures.job == "steady")
    values = [value for span in job.figures.spans for value in span.ofu]
    naive = 1.96 * stdev(values) / math.sqrt(len(values))
    assert job.figures.interval is not None
    assert job.figures.interval.half_width is not None
    assert job.figures.interval.half_width > 2.5 * naive


def test_mfu_minus_ofu_has_the_interval_of_ofu_where_mfu_is_one_number(report: FleetReport) -> None:
    (job,) = (one for one in report.jobs if one.figures.job == "steady")
    assert job.difference is not None
    assert job.figures.interval is not None
    assert job.difference.mean == pytest.approx(0.42 - job.figures.interval.mean)
    assert job.difference.half_width == pytest.approx(job.figures.interval.half_width)


def test_mfu_over_time_is_compared_at_the_same_times() -> None:
    """What slows a job slows its MFU too, and is not in the interval of their difference."""
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    add_job(fleet, "job", [LEVEL] * STEPS, start=600)
    random = Random("job")
    common = wandering(random, STEPS)
    mfu_at = {600.0 + 30 * (place + 1): 0.38 + one for place, one in enumerate(common)}
    told = Application(fmean(mfu_at.values()), times=frozenset(mfu_at), mfu_at=mfu_at)
    (paired,) = fleet_report(fleet, {"job": told}).jobs
    (alone,) = fleet_report(fleet, {"job": Application(told.mfu)}).jobs
    assert paired.difference is not None
    assert alone.difference is not None
    assert paired.difference.mean == pytest.approx(alone.difference.mean, abs=1e-6)
    assert paired.difference.half_width is not None
    assert alone.difference.half_width is not None
    assert paired.difference.half_width < alone.difference.half_width / 3


def test_a_fall_has_its_interval_and_is_certain(report: FleetReport) -> None:
    (fall,) = report.regressions
    assert fall.interval is not None
    assert fall.interval.mean == pytest.approx(fall.before - fall.after, abs=0.003)
    assert fall.interval.includes(LEVEL - AFTER)
    assert not fall.interval.includes(0)
    assert fall.is_certain is True


def test_the_interval_of_a_fall_is_not_moved_by_checkpoints() -> None:
    random = Random(4)
    levels = [LEVEL] * STEPS + [AFTER] * STEPS
    values = [
        0.02 if place % 60 < 4 else level + one
        for place, (level, one) in enumerate(zip(levels, wandering(random, len(levels)), strict=True))
    ]
    (drop,) = find_drops([30.0 * place for place in range(len(values))], values)
    assert drop.interval is not None
    assert drop.interval.includes(LEVEL - AFTER)
    assert drop.interval.half_width is not None
    assert drop.interval.half_width < 0.02


@pytest.mark.parametrize(
    ("past", "certain"),
    [((0.40, 0.41), False), ((0.40, 0.405, 0.395), True), ((0.40, 0.401, 0.399, 0.40), True)],
)
def test_few_earlier_jobs_say_little(past: tuple[float, ...], certain: bool) -> None:
    levels = [JobLevel(f"job-{n}", "run", 8, float(n), ofu) for n, ofu in enumerate((*past, 0.30))]
    (fall,) = slower_than_earlier_jobs(levels)
    assert fall.is_certain is certain
    # The prediction interval of one more job, by hand.
    half_width = t_quantile(0.975, len(past) - 1) * stdev(past) * math.sqrt(1 + 1 / len(past))
    assert fall.interval is not None
    assert fall.interval.half_width == pytest.approx(half_width)


def test_json_text_and_page_show_them(report: FleetReport) -> None:
    data = json.loads(json.dumps(report_as_json(report), allow_nan=False))
    jobs = {job["job"]: job for job in data["jobs"]}
    interval = jobs["steady"]["ofu_interval"]
    assert interval["low"] < LEVEL < interval["high"]
    assert interval["mean"] == pytest.approx(jobs["steady"]["ofu"]["mean"])
    assert (interval["confidence"], interval["reason"]) == (0.95, None)
    points = jobs["steady"]["difference_points_interval"]
    assert points["mean"] == pytest.approx(jobs["steady"]["difference_points"])
    assert jobs["short"]["ofu_interval"]["half_width"] is None
    assert jobs["fell"]["difference_points_interval"] is None
    (fall,) = data["regressions"]
    assert fall["certain"] is True
    assert fall["points_interval"]["mean"] == pytest.approx(100 * (fall["before"] - fall["after"]), abs=0.3)
    assert jobs["fell"]["drops"][0]["points_interval"] == fall["points_interval"]
    half_width = f"± {100 * interval['half_width']:.1f}"
    ofu = f"{100 * interval['mean']:.1f} ({half_width})"
    text, page = report_as_text(report), report_as_html(report)
    assert ofu in text
    assert ofu in page
    assert "± is half of the 95 % confidence interval, in points" in text
    assert "  yes      within the job; 4 GPUs" in text
    assert "points (certain)" in page


def test_a_fall_that_may_be_chance_is_said_to_be_so() -> None:
    fleet = FleetSamples(start=0, end=10 * 86400, step_s=30, tensor_mhz=1000)
    for number, level in enumerate((0.40, 0.42, 0.33)):
        add_job(fleet, f"job-{number}", [level] * 120, start=7200.0 * number)
    applications = {f"job-{number}": Application(None, run="run") for number in range(3)}
    report = fleet_report(fleet, applications)
    (fall,) = report.regressions
    assert fall.is_certain is False
    assert "no: includes 0" in report_as_text(report)
    assert "not certain: the interval includes 0" in report_as_html(report)


def test_samples_that_are_too_rare_are_a_note_whoever_is_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    add_job(fleet, "rare", [LEVEL] * 60, start=600, step_s=120)
    add_job(fleet, "sound", [LEVEL] * 60, start=600)
    (note,) = fleet_report(fleet).notes
    assert note.startswith("1 jobs are sampled too rarely: rare; samples every 120 s miss time")

    class Silent(PrometheusAPI):
        def query_range(self, *_: object) -> list[object]:  # type: ignore[override]
            return []

    server = Silent("http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "perf_metrics"):
        fleets = [collect_fleet(server, 0, 3600, step_s=step_s) for step_s in (61.0, 61.0, 30.0)]
    server.close()
    told = [[note for note in fleet.notes if "miss time" in note] for fleet in fleets]
    assert [len(notes) for notes in told] == [1, 1, 0]
    assert [record.message for record in caplog.records] == told[0]
