"""The report on a fleet as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeAlias

from ..uncertainty import MeanInterval, interval_json
from .gpu_health import GPUHealth
from .job_figures import JobFigures, OddDevice
from .regressions import Regression
from .report import FleetReport, JobReport, iso

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | int | bool | None"


def report_as_json(report: FleetReport, price: float | None = None) -> dict[str, Any]:
    """Return the report as what `json` can write: shares from 0 to 1, differences in percentage points.

    Times are ISO 8601 in UTC. What is not known is None.

    Args:
        report: The report.
        price: Of one GPU hour, for costs by user.
    """
    return {
        "start": iso(report.start),
        "end": iso(report.end),
        "step_s": report.step_s,
        "fleet": {
            "jobs": len(report.jobs),
            "samples": sum(job.figures.samples for job in report.jobs),
            **{name: getattr(report, name) for name in ("devices", "device_hours", "ofu_mean")},
            **({} if price is None else {"cost": price * report.device_hours}),
            "mfu_share": report.mfu_share,
            "unallocated_hours": report.unallocated_hours,
            "ofu_of_all_hours": report.ofu_of_all_hours,
            "hours": {str(kind): hours for kind, hours in report.hours.items()},
        },
        "agreement": {
            "all": None if report.agreement is None else asdict(report.agreement),
            "buckets": [asdict(bucket) for bucket in report.buckets],
        },
        "users": [
            {**asdict(one), "cost": None if price is None else price * one.device_hours}
            for one in report.users
        ],
        "outliers": [job.figures.job for job in report.outliers],
        "regressions": [_regression_json(one) for one in report.regressions],
        "gpus": [_gpu_json(one) for one in report.gpus],
        "jobs": [_job(job) for job in report.jobs],
        "notes": list(report.notes),
    }


def _regression_json(one: Regression) -> Json:
    told = {name: getattr(one, name) for name in ("before", "after", "fall", "lost_gpus", "detail")}
    return {
        "job": one.job,
        "kind": one.kind,
        "time": iso(one.time_s),
        **told,
        "points_interval": _points_json(one.interval),
        "certain": one.is_certain,
    }


def _gpu_json(one: GPUHealth) -> Json:
    return {
        "device": str(one.device),
        "uuid": one.device.uuid,
        **{name: getattr(one, name) for name in ("level", "lost_hours", "job_hours", "jobs")},
        "evidence": [
            {
                **{name: getattr(each, name) for name in ("kind", "level", "text", "lost_hours")},
                "first": None if each.first_s is None else iso(each.first_s),
                "jobs": list(each.jobs),
            }
            for each in one.evidence
        ],
    }


def _interval_json(interval: MeanInterval | None) -> Json:
    return None if interval is None else {**interval_json(interval)}


def _points_json(interval: MeanInterval | None) -> Json:
    """Return the interval of a difference of shares in percentage points."""
    return _interval_json(None if interval is None else interval.scaled(100))


def _job(job: JobReport) -> Json:
    figures, pair = job.figures, job.pair
    return {
        "job": figures.job,
        "run": job.run,
        "user": None if job.identity is None else job.identity.user,
        "account": None if job.identity is None else job.identity.account,
        "gpus": job.gpus,
        "devices": len(figures.devices),
        **_measured(figures),
        "mfu": job.application.mfu,
        "difference_points": None if pair is None else pair.points,
        "difference_points_interval": _points_json(job.difference),
        "correlation": job.correlation,
        "hours": {str(kind): hours for kind, hours in job.hours.items()},
        "ratio": pair.mfu / pair.ofu if pair is not None and pair.ofu else None,
        "outlier": job.outlier,
        "candidates": [{**asdict(one), "expected": list(one.expected)} for one in job.candidates],
    }


def _odd_device_json(odd: OddDevice) -> Json:
    told = {name: getattr(odd.figures, name) for name in ("ofu", "tensor_activity", "sm_mhz", "samples")}
    return {"kind": odd.kind, "device": str(odd.figures.device), **told}


def _measured(figures: JobFigures) -> dict[str, Json]:
    return {
        "start": iso(figures.start),
        "end": iso(figures.end),
        **{name: getattr(figures, name) for name in ("cut", "device_hours", "samples", "left_out")},
        "ofu": None if figures.ofu is None else asdict(figures.ofu),
        "ofu_interval": _interval_json(figures.interval),
        "imbalance": figures.imbalance,
        "odd_devices": [_odd_device_json(odd) for odd in figures.odd_devices],
        "drops": [
            {
                "time": iso(drop.time_s),
                "before": drop.before,
                "after": drop.after,
                "points_interval": _points_json(drop.interval),
            }
            for drop in figures.drops
        ],
    }
