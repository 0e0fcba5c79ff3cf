"""The panels about all jobs: how the fleet does, and which jobs to look at."""

from __future__ import annotations

from . import recorded_series as series
from .alert_rules import APART
from .dashboard_view import UID, View, legend
from .grafana_panels import Column, Json, Query, bar_gauge, scatter, share, stat, table, time_series

_COUNT: Json = {"unit": "none", "decimals": 0}
_MARKED = share(
    thresholds={
        "mode": "absolute",
        "steps": [
            {"color": "orange", "value": None},
            {"color": "transparent", "value": -APART},
            {"color": "orange", "value": APART},
        ],
    },
    **{"custom.cellOptions": {"type": "color-background", "mode": "basic"}},
)


def present(view: View) -> list[Json]:
    """How it is now, in four figures."""
    cluster = legend(view.labels.cluster)
    return [
        stat(
            "OFU of GPUs in jobs",
            "Mean over the GPUs and MIG slices that a job has, now.",
            Query(f"{series.FLEET_OFU_IN_JOBS}{view.fleet}", cluster),
            share(),
        ),
        stat(
            "OFU of all GPUs",
            "The same with those that no job has.",
            Query(f"{series.FLEET_OFU}{view.fleet}", cluster),
            share(),
        ),
        stat(
            "GPUs",
            "GPUs and MIG slices that show tensor activity, with and without a job.",
            Query(f"count({series.ACTIVITY}{view.fleet})"),
            _COUNT,
        ),
        stat(
            "Jobs with GPUs",
            "Jobs that have a GPU or a MIG slice.",
            Query(f"count({series.JOB_GPUS}{view.fleet})"),
            _COUNT,
        ),
    ]


def over_time(view: View) -> Json:
    """How the fleet has done."""
    cluster = view.labels.cluster
    return time_series(
        "OFU of the fleet",
        "Mean over GPUs and MIG slices.",
        [
            Query(f"{series.FLEET_OFU_IN_JOBS}{view.fleet}", legend(cluster, also="in jobs")),
            Query(f"{series.FLEET_OFU}{view.fleet}", legend(cluster, also="all")),
        ],
        share(min=0),
    )


def lowest_jobs(view: View) -> Json:
    """Which jobs to look at first."""
    return bar_gauge(
        "Jobs with the lowest OFU",
        "Mean over the last hour, of jobs that run.",
        Query(
            f"sort(bottomk(10, {series.JOB_OFU_1H}{view.fleet}))",
            legend(view.labels.cluster, view.labels.job),
        ),
        share(min=0, max=1),
    )


def jobs(view: View) -> Json:
    """Every job, with MFU beside OFU."""
    return table(
        "Jobs",
        "Means over the last hour; difference and ratio are over the time in which a job told MFU. More than "
        f"{APART:.0%} of peak apart is marked. A job's name leads to its panels below.",
        [
            *_names(view, {"links": [_LINK]}),
            Column("GPUs", f"{view.by_job} ({series.JOB_GPUS}{view.fleet})"),
            Column("OFU", f"{view.by_job} ({series.JOB_OFU_1H}{view.fleet})", field=share()),
            Column("MFU", f"{view.by_job} ({series.JOB_MFU_1H}{view.fleet})", field=share()),
            Column("MFU - OFU", f"{view.by_job} ({series.JOB_MFU_MINUS_OFU_1H}{view.fleet})", field=_MARKED),
            Column(
                "MFU / OFU",
                f"{view.by_job} ({series.JOB_MFU_OVER_OFU_1H}{view.fleet})",
                field={"decimals": 2},
            ),
        ],
        sort_by="OFU",
    )


def mfu_against_ofu(view: View) -> Json:
    """Whose count of FLOPs is off."""
    return scatter(
        "MFU against OFU",
        "A point for each job that tells MFU; means over the last hour. A right count is near the diagonal.",
        [
            *_names(view, None),
            Column("OFU", f"{view.by_job} ({series.JOB_OFU_WITH_MFU_1H}{view.fleet})"),
            Column("MFU", f"{view.by_job} ({series.JOB_MFU_1H}{view.fleet})"),
        ],
        "OFU",
        "MFU",
        share(min=0, custom={"show": "points", "pointSize": {"fixed": 7}}),
    )


def _names(view: View, field: Json | None) -> list[Column]:
    cluster = view.labels.cluster
    job = Column("Job", label=view.labels.job, field=field)
    return [job] if cluster is None else [Column("Cluster", label=cluster), job]


_LINK: Json = {
    "title": "Show this job below",
    "url": f"/d/{UID}?var-job=${{__value.raw}}&${{datasource:queryparam}}&${{__url_time_range}}",
    "targetBlank": False,
}
