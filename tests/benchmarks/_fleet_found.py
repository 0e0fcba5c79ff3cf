"""What of all that is planted in a synthetic fleet a report has found, and what it has found beside that."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from _fleet_tests.planted import FALLEN
from _fleet_tests.synthetic_plan import SCRAPE_S
from _fleet_tests.synthetic_truth import JobTruth, Truth

Job = Mapping[str, Any]
"""A job of the report."""

SAME = 1e-9
"""Relative difference that the order of a sum may make; each sample is in the answer just once."""
LATE = 0.03
"""The same where scrapes come late, so that a step of the query may hold two samples, and the next none. A
job near the edge of the rule for outliers can then come to lie on its other side."""


@dataclass(frozen=True)
class Found:
    """How many of one kind were planted, how many of these were found, and how many beside them.

    `differs` names those that are in one of the two only.
    """

    what: str
    planted: int
    found: int
    beside: int
    differs: tuple[str, ...]


def found_in(report: Mapping[str, Any], truth: Truth) -> list[Found]:
    """Return what was found of each kind."""
    jobs = {job["job"]: job for job in report["jobs"]}
    kinds = [
        *_mistakes(jobs, truth),
        *_falls(report, jobs, truth),
        *_odd_devices(jobs, truth),
        ("outliers", {name for name, job in truth.jobs.items() if job.is_outlier}, report["outliers"]),
        (
            "OFU of the job",
            truth.jobs,
            [name for name, job in truth.jobs.items() if _is_true(jobs[name], job)],
        ),
    ]
    return [_found(*kind) for kind in kinds]


_Kind = tuple[str, Collection[Hashable], Collection[Hashable]]
"""What it is, what was planted, and what the report tells."""


def _found(what: str, planted: Collection[Hashable], told: Collection[Hashable]) -> Found:
    real, seen = set(planted), set(told)
    return Found(what, len(real), len(real & seen), len(seen - real), tuple(sorted(map(str, real ^ seen))))


def _mistakes(jobs: Mapping[str, Job], truth: Truth) -> Iterator[_Kind]:
    """Found is the first candidate, and one that is as near as the first, as it gives the same ratio."""
    planted: dict[str, list[str]] = {}
    for name, job in truth.jobs.items():
        if job.plan.mistake is not None:
            planted.setdefault(job.plan.mistake.cause, []).append(name)
    for cause, names in planted.items():
        yield cause, names, [name for name in names if _is_first(cause, jobs[name])]


def _is_first(cause: str, job: Job) -> bool:
    candidates = job["candidates"]
    return any(
        one["name"] == cause and math.isclose(one["distance"], candidates[0]["distance"], abs_tol=SAME)
        for one in candidates
    )


def _falls(report: Mapping[str, Any], jobs: Mapping[str, Job], truth: Truth) -> Iterator[_Kind]:
    for kind in ("within the job", "against earlier jobs of the run"):
        planted = [name for name, job in truth.jobs.items() if kind in job.regressions]
        told = [one["job"] for one in report["regressions"] if one["kind"] == kind]
        yield f"OFU fell {kind}", planted, told
        if kind == "within the job":
            yield (
                "... dated within a step",
                planted,
                [name for name in planted if _is_dated(jobs[name], truth)],
            )
        yield f"... of these {FALLEN!r}", planted, [name for name in told if _is_first(FALLEN, jobs[name])]


def _is_dated(job: Job, truth: Truth) -> bool:
    fall = truth.jobs[job["job"]].fall
    times = [datetime.fromisoformat(drop["time"]).timestamp() for drop in job["drops"]]
    return fall is not None and any(0 <= time_s - fall.time_s <= SCRAPE_S for time_s in times)


def _odd_devices(jobs: Mapping[str, Job], truth: Truth) -> Iterator[_Kind]:
    for kind in ("slow clock", "less work"):
        planted = [
            (name, device)
            for name, job in truth.jobs.items()
            for device, what in job.odd_devices.items()
            if what == kind
        ]
        told = [
            (name, odd["device"])
            for name, job in jobs.items()
            for odd in job["odd_devices"]
            if odd["kind"] == kind
        ]
        yield f"GPU with {kind}", planted, told


def _is_true(told: Job, job: JobTruth) -> bool:
    return math.isclose(told["ofu"]["mean"], job.mean, rel_tol=SAME if job.exact else LATE)
