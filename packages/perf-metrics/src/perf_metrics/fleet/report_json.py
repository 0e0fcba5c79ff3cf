"""A fleet's report for programs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TypeAlias

from .agreement import Agreement
from .job_figures import JobFigures, OddDevice
from .regressions import Regression
from .report import FleetReport, JobReport

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | int | bool | None"


def report_as_json(report: FleetReport) -> dict[str, Json]:
    """Return the report as what `json` can write: shares from 0 to 1, differences in percentage points.

    Times are ISO 8601 in UTC. What is not known is None.
    """
    return {
        "start": iso(report.start),
        "end": iso(report.end),
        "step_s": report.step_s,
        "fleet": {
            "jobs": len(report.jobs),
            "devices": report.devices,
            "device_hours": report.device_hours,
            "samples": sum(job.figures.samples for job in report.jobs),
            "ofu_mean": report.ofu_mean,
        },
        "agreement": {
            "all": _agreement(report.agreement),
            "buckets": [_agreement(bucket) for bucket in report.buckets],
        },
        "outliers": [job.figures.job for job in report.outliers],
        "regressions": [_regression(one) for one in report.regressions],
        "jobs": [_job(job) for job in report.jobs],
        "notes": list(report.notes),
    }


def iso(time_s: float) -> str | None:
    """Return a Unix time as ISO 8601 in UTC, to the second; None for no time."""
    if time_s != time_s:
        return None
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _agreement(one: Agreement | None) -> Json:
    return None if one is None else asdict(one)


def _regression(one: Regression) -> Json:
    return {
        "job": one.job,
        "kind": one.kind,
        "time": iso(one.time_s),
        "before": one.before,
        "after": one.after,
        "fall": one.fall,
        "lost_gpus": one.lost_gpus,
        "detail": one.detail,
    }


def _job(job: JobReport) -> Json:
    figures, pair = job.figures, job.pair
    return {
        "job": figures.job,
        "run": job.application.run,
        "gpus": job.gpus,
        "devices": len(figures.devices),
        **_measured(figures),
        "mfu": job.application.mfu,
        "difference_points": None if pair is None else pair.points,
        "ratio": pair.mfu / pair.ofu if pair is not None and pair.ofu else None,
        "outlier": job.outlier,
        "candidates": [
            {
                "name": one.name,
                "expected": list(one.expected),
                "distance": one.distance,
                "arithmetic": one.arithmetic,
                "check": one.check,
            }
            for one in job.candidates
        ],
    }


def _odd_device(odd: OddDevice) -> Json:
    figures = odd.figures
    return {
        "kind": odd.kind,
        "device": str(figures.device),
        "ofu": figures.ofu,
        "tensor_activity": figures.tensor_activity,
        "sm_mhz": figures.sm_mhz,
        "samples": figures.samples,
    }


def _measured(figures: JobFigures) -> dict[str, Json]:
    return {
        "start": iso(figures.start),
        "end": iso(figures.end),
        "cut": figures.cut,
        "device_hours": figures.device_hours,
        "samples": figures.samples,
        "left_out": figures.left_out,
        "ofu": None if figures.ofu is None else asdict(figures.ofu),
        "imbalance": figures.imbalance,
        "odd_devices": [_odd_device(odd) for odd in figures.odd_devices],
        "drops": [
            {"time": iso(drop.time_s), "before": drop.before, "after": drop.after} for drop in figures.drops
        ],
    }
