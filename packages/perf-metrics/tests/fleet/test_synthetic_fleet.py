"""The synthetic fleet is what it says: like the published table, seeded, and true to what Prometheus has."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest

from .dcgm_series import CLOCK_NAME, NEW_NAME, OLD_NAME
from .fleet_command import ServedFleet
from .production_table import TABLE, Bucket, bucket_sizes
from .synthetic_counters import TENSOR_MHZ, job_counters
from .synthetic_fleet import MFU_NAME, write_fleet
from .synthetic_plan import SCRAPE_S, FleetSize, Job, plan_fleet

pytestmark = pytest.mark.xdist_group("fleet")

FULL = FleetSize.scaled(1.0)


def test_full_size_is_as_described() -> None:
    jobs = plan_fleet(FULL).jobs
    assert (FULL.jobs, FULL.days, len(jobs)) == (600, 15, 600)
    assert all(3600 <= job.end_s - job.start_s <= 4 * 3600 for job in jobs)
    assert max(len(job.places) for job in jobs) == 8
    assert bucket_sizes(608) == [bucket.jobs for bucket in TABLE]


@cache
def jobs_of_twenty_fleets() -> list[Job]:
    return [job for seed in range(20) for job in plan_fleet(FULL, seed).jobs]


@pytest.mark.parametrize("bucket", TABLE, ids=lambda bucket: f"{bucket.gpus} GPUs")
def test_jobs_without_anything_planted_are_as_in_the_published_table(bucket: Bucket) -> None:
    """Over 20 fleets. On 288 GPUs errors are smaller, as OFU cannot be as high as the largest ones want."""
    jobs = [job for job in jobs_of_twenty_fleets() if job.from_table and job.gpus == bucket.gpus]
    errors = [100 * abs(job.difference) for job in jobs]
    assert fmean(errors) == pytest.approx(bucket.error_mean, rel=0.15)
    assert stdev(errors) == pytest.approx(bucket.error_sd, rel=0.30)
    assert fmean(100 * (job.ofu + job.difference) for job in jobs) == pytest.approx(bucket.mfu_mean, rel=0.15)


def test_clocks_under_load_move_as_published() -> None:
    job = plan_fleet(FULL).jobs[0]
    mhz = [value for device in job_counters(job, Random(0)) for value in device.mhz]
    assert min(mhz) >= 1201
    assert max(mhz) <= 1558
    assert fmean(mhz) == pytest.approx(1352, abs=3)
    assert stdev(mhz) == pytest.approx(32, abs=2)


def test_a_fleet_is_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    texts, size = [], FleetSize(50, 1)
    for place in ("first", "again"):
        (tmp_path / place).mkdir()
        fleet = write_fleet(tmp_path / place, size, seed=3)
        texts.append([path.read_bytes() for path in (*fleet.openmetrics, fleet.mfu_file)])
    assert texts[0] == texts[1]
    assert plan_fleet(size, 3) != plan_fleet(size, 4)


def test_one_that_has_no_room_for_all_that_is_planted_is_refused() -> None:
    with pytest.raises(ValueError, match="take 50 in a day or more"):
        plan_fleet(FleetSize(20, 1))


def test_all_samples_are_in_the_server(small_fleet: ServedFleet) -> None:
    fleet, counted = small_fleet.fleet, 0
    for name in (OLD_NAME, NEW_NAME, CLOCK_NAME, MFU_NAME):
        (answer,) = small_fleet.server.query(f"sum(count_over_time({name}[4d]))", fleet.truth.end_s + 86400)
        counted += int(answer["value"][1])
    assert counted == fleet.samples


def test_prometheus_multiplies_and_averages_to_the_same_ofu(small_fleet: ServedFleet) -> None:
    """On a job with whole GPUs of one host, whose samples have no hole."""
    jobs = small_fleet.fleet.truth.jobs.values()
    tidy = next(
        job
        for job in jobs
        if job.exact
        and not (job.plan.blanks or job.plan.gap or job.plan.slices or job.plan.without_clock)
        and {host.metric_names for host, _ in job.plan.places} == {"old"}
    )
    match = f'{{hpc_job="{tidy.name}"}}'
    product = f"{OLD_NAME}{match} * on (UUID, hpc_job) {CLOCK_NAME}{match}"
    # A subquery is evaluated at multiples of its step, where it sees the sample before.
    first, last = (SCRAPE_S * math.ceil(time_s / SCRAPE_S) for time_s in (tidy.first_s, tidy.last_s))
    query = f"avg(avg_over_time(({product})[{last - first}s:30s] @ {last})) / {TENSOR_MHZ}"
    (answer,) = small_fleet.server.query(query, last)
    assert float(answer["value"][1]) == pytest.approx(tidy.mean, rel=1e-9)
