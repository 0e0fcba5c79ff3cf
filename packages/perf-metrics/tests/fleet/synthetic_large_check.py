"""A report on a large synthetic fleet beside what is true of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from .planted import OddKind
from .synthetic_large import LargeJobTruth
from .synthetic_large_plan import SCRAPE_S


@dataclass(frozen=True)
class Compared:
    """One kind of figure.

    Attributes:
        what: What it is, with its unit.
        planted: How many there are.
        found: How many of these the report has.
        beside: How many it has beside them.
        error: Largest error of one of them in the unit; None for what is there or not.
    """

    what: str
    planted: int
    found: int
    beside: int
    error: float | None = None


def compared(
    report: Mapping[str, Any], truth: Mapping[str, LargeJobTruth], errors: Mapping[str, str]
) -> list[Compared]:
    """Return what the JSON of a report says of each kind of figure, beside the truth.

    Args:
        report: What the command wrote.
        truth: Of the jobs that it is about.
        errors: Of all GPUs, by UUID.
    """
    told = {job["job"]: job for job in report["jobs"]}
    true_users, told_users = _users(truth), _told_users(report)
    both = [(told[name], job) for name, job in truth.items() if name in told]
    return [
        _there("jobs", truth, told),
        _figure("GPUs at a time", [(job["gpus"], true.plan.gpus) for job, true in both]),
        _figure("GPU hours of a job", [(job["device_hours"], true.gpu_hours) for job, true in both]),
        _figure("mean OFU of a job, relative", [(job["ofu"]["mean"] / true.ofu, 1) for job, true in both]),
        *_falls(report, truth),
        _there(
            "odd devices",
            {(name, *odd) for name, job in truth.items() for odd in job.odd_devices.items()},
            [(name, odd["device"], odd["kind"]) for name, job in told.items() for odd in job["odd_devices"]],
        ),
        _there("GPUs with errors", errors.items(), _told_errors(report)),
        _there("users with their accounts", true_users, told_users),
        _figure(
            "GPU hours of a user",
            [(told_users[user], hours) for user, hours in true_users.items() if user in told_users],
        ),
    ]


def _told_errors(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [(gpu["uuid"], each["kind"]) for gpu in report["gpus"] for each in gpu["evidence"]]
    return [(uuid, kind) for uuid, kind in found if kind not in get_args(OddKind)]


def _there(what: str, planted: Collection[Hashable], told: Collection[Hashable]) -> Compared:
    real, seen = set(planted), set(told)
    return Compared(what, len(real), len(real & seen), len(seen - real))


def _figure(what: str, pairs: Collection[tuple[float, float]]) -> Compared:
    return Compared(what, len(pairs), len(pairs), 0, max(abs(told - true) for told, true in pairs))


def _falls(report: Mapping[str, Any], truth: Mapping[str, LargeJobTruth]) -> Iterator[Compared]:
    falling = {name: job.falls_s for name, job in truth.items() if job.falls_s is not None}
    slower = [name for name, job in truth.items() if job.plan.is_slower]
    for kind, planted in (("within the job", falling), ("against earlier jobs of the run", slower)):
        told = [one for one in report["regressions"] if one["kind"] == kind]
        yield _there(f"OFU fell {kind}", planted, [one["job"] for one in told])
        if kind == "within the job":
            yield _figure(
                "time of these, in scrapes",
                [
                    ((datetime.fromisoformat(one["time"]).timestamp() - falling[one["job"]]) / SCRAPE_S, 0)
                    for one in told
                    if one["job"] in falling
                ],
            )


def _users(truth: Mapping[str, LargeJobTruth]) -> dict[tuple[str, str], float]:
    hours: defaultdict[tuple[str, str], float] = defaultdict(float)
    for job in truth.values():
        hours[job.plan.user, job.plan.account] += job.gpu_hours
    return dict(hours)


def _told_users(report: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    return {(one["user"], one["account"]): one["device_hours"] for one in report["users"]}
