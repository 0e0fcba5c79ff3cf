"""A fleet of H100 jobs on disk: OpenMetrics for Prometheus, the MFU that the jobs report, and the truth.

Modelled on the published table of 608 production jobs. Seeded: the same for the same arguments.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

from .dcgm_series import write_clocks_of_slices, write_counters, write_idle
from .openmetrics_pieces import Pieces
from .synthetic_counters import GPU, Counters, fall_ms, job_counters, scrape_times
from .synthetic_plan import SCRAPE_S, FleetSize, Job, Plan, plan_fleet
from .synthetic_truth import JobTruth, Level, Truth

MFU_NAME = "training_mfu_ratio"
"""The series that each job reports itself, with the mean of the MFU file."""
_IDLE_AFTER_S = 600
_MISCOUNTED_BY = 0.01
"""A mistake's ratio comes out within this, either way."""


@dataclass(frozen=True)
class SyntheticFleet:
    """A fleet on disk.

    Attributes:
        openmetrics: Files for `PrometheusServer.backfill`, all of them.
        mfu_file: What the jobs report, as CSV.
        samples: Number of samples in the files, of all metrics.
        truth: What is true of it.
    """

    openmetrics: tuple[Path, ...]
    mfu_file: Path
    samples: int
    truth: Truth


def write_fleet(folder: Path, size: FleetSize, seed: int = 0) -> SyntheticFleet:
    """Write a fleet into a folder.

    Raises:
        ValueError: It is too small for all that is to be planted.
    """
    plan = plan_fleet(size, seed)
    with Pieces(folder) as pieces:
        jobs = _write_jobs(pieces, plan, seed)
        _write_idle_host(pieces, plan)
    mfu_file = folder / "mfu.csv"
    _write_mfu(mfu_file, list(jobs.values()))
    truth = Truth(plan.start_s, plan.end_s, jobs)
    return SyntheticFleet(pieces.paths, mfu_file, pieces.samples, truth)


def _write_jobs(pieces: Pieces, plan: Plan, seed: int) -> dict[str, JobTruth]:
    taken_over = {job.after: job for job in plan.jobs if job.after is not None}
    shared: dict[str, list[Counters]] = {}
    jobs: dict[str, JobTruth] = {}
    for job in plan.jobs:
        random = Random(f"{seed}/{job.name}")
        devices = job_counters(job, random)
        if job.after is not None:
            devices = [_continued(one, shared[job.name]) for one in devices]
        left: Sequence[Counters] = devices
        follower = taken_over.get(job.name)
        if follower is not None:
            shared[follower.name] = [one.part(follower.start_s * 1000) for one in devices[:2]]
            left = devices[2:]
        for counters in devices:
            write_counters(pieces, counters, job.name)
        write_clocks_of_slices(pieces, devices)
        _write_idle_after(pieces, job, left, random)
        jobs[job.name] = truth = _truth(plan, job, devices, random)
        _write_mfu_series(pieces, truth, devices[0].times_ms)
    return jobs


def _continued(own: Counters, shared: Sequence[Counters]) -> Counters:
    """Return what a device showed that two jobs had for a while: then it is the same for both."""
    before = next(one for one in shared if one.gpu == own.gpu)
    after = own.part(before.times_ms[-1] + 1)
    moved = {place + len(before.times_ms): what for place, what in after.blank.items()}
    return Counters(
        own.gpu,
        before.times_ms + after.times_ms,
        before.activity + after.activity,
        before.mhz + after.mhz,
        before.blank | moved,
    )


def _write_idle_after(pieces: Pieces, job: Job, devices: Sequence[Counters], random: Random) -> None:
    for gpu in dict.fromkeys(one.gpu.whole for one in devices):
        write_idle(pieces, gpu, list(scrape_times(gpu.host, job.end_s, job.end_s + _IDLE_AFTER_S, random)))


def _write_idle_host(pieces: Pieces, plan: Plan) -> None:
    """Two GPUs that no job has in all the time."""
    times = list(scrape_times(plan.idle_host, plan.start_s, plan.end_s, Random(0)))
    for index in range(2):
        write_idle(pieces, GPU(plan.idle_host, index), times)


def _truth(plan: Plan, job: Job, devices: Sequence[Counters], random: Random) -> JobTruth:
    # A query with steps of 30 s looks back one step from its first point, and not beyond its last.
    first_ms, last_ms = (plan.start_s - SCRAPE_S) * 1000 + 1, plan.end_s * 1000
    values = array("d")
    means: dict[str, tuple[float, float, float]] = {}
    times: set[int] = set()
    for counters in devices:
        used = list(counters.ofu(first_ms, last_ms))
        if not used:
            continue
        values.extend(ofu for _, ofu, _ in used)
        times.update(counters.times_ms[place] for place, _, _ in used)
        means[str(counters.gpu)] = (
            math.fsum(ofu for _, ofu, _ in used) / len(used),
            math.fsum(counters.activity[place] for place, _, _ in used) / len(used),
            math.fsum(mhz for _, _, mhz in used) / len(used),
        )
    mean = math.fsum(values) / len(values)
    return JobTruth(
        plan=job,
        exact=not any(host.late for host, _ in job.places),
        mfu=_mfu(job, mean, random),
        ofu=array("d", sorted(values)),
        devices=means,
        first_s=min(times) / 1000,
        last_s=max(times) / 1000,
        fall=_fall(job, devices),
    )


def _mfu(job: Job, mean: float, random: Random) -> float:
    if job.mistake is not None:
        return round(mean * job.mistake.ratio * random.uniform(1 - _MISCOUNTED_BY, 1 + _MISCOUNTED_BY), 6)
    return round(max(mean + job.difference, 0.005), 6)


def _fall(job: Job, devices: Sequence[Counters]) -> Level | None:
    falls_ms = fall_ms(job)
    if falls_ms is None:
        return None
    # The pace changes with the number of the scrape.
    falls_ms = (falls_ms // (1000 * SCRAPE_S) + 1) * 1000 * SCRAPE_S
    used = [(one.times_ms[place], ofu) for one in devices for place, ofu, _ in one.ofu(0, 1 << 62)]
    before = median(ofu for time_ms, ofu in used if time_ms < falls_ms)
    after = median(ofu for time_ms, ofu in used if time_ms >= falls_ms)
    return Level(min(time_ms for time_ms, _ in used if time_ms >= falls_ms) / 1000, before, after)


def _write_mfu_series(pieces: Pieces, job: JobTruth, times_ms: list[int]) -> None:
    host = job.plan.places[0][0].name
    labels = f'hpc_job="{job.name}",instance="{host}:9401",job="training"'
    shares = [1.0] * len(times_ms)
    if job.fall is not None:
        left = job.fall.after / job.fall.before
        shares = [left if time_ms / 1000 >= job.fall.time_s else 1.0 for time_ms in times_ms]
    usual = job.mfu / fmean(shares)
    pieces.write(MFU_NAME, labels, times_ms, [usual * share for share in shares])


def _write_mfu(path: Path, jobs: Sequence[JobTruth]) -> None:
    rows = []
    for job in jobs:
        facts = {} if job.plan.mistake is None else job.plan.mistake.facts
        told = {name: str(fact).lower() if isinstance(fact, bool) else fact for name, fact in facts.items()}
        rows.append({"job": job.name, "mfu": job.mfu, "run": job.plan.run, "gpus": job.plan.gpus, **told})
    columns = dict.fromkeys(name for row in rows for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
