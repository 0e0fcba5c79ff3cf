"""A dashboard for Grafana that shows what the rules record."""

from __future__ import annotations

from . import dashboard_fleet, dashboard_job
from .dashboard_view import UID, View, variables
from .grafana_panels import Json, laid_out, row
from .recorded_series import FleetLabels

_SCHEMA = 39
"""That of Grafana 11; newer ones bring it up to theirs when they load it."""


def grafana_dashboard(*, job_label: str = "hpc_job", cluster_label: str | None = None) -> Json:
    """Return a dashboard for Grafana, to be written as JSON.

    It shows the series that `recording_and_alert_rules` records with the same labels: OFU of the fleet now
    and over time, of each job with MFU beside it, and of each device of one job with its SM clock.

    Args:
        job_label: Label that names a job.
        cluster_label: Label that names the cluster; None where one server has one cluster.

    Raises:
        ValueError: One of them is not the name of a label, or has another meaning already.
    """
    view = View(FleetLabels(job_label, cluster_label))
    fleet, job = dashboard_fleet, dashboard_job
    return {
        "id": None,
        "uid": UID,
        "title": "OFU of a fleet",
        "description": "Tensor pipe activity x SM clock / clock of the tensor peak, beside MFU of the jobs.",
        "tags": ["gpu", "ofu", "training"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        # The pointer of one panel shows in all.
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables(view)},
        "panels": laid_out(
            [
                [(row("Fleet"), 24, 1)],
                [(panel, 6, 4) for panel in fleet.present(view)],
                [(fleet.over_time(view), 12, 9), (fleet.lowest_jobs(view), 12, 9)],
                [(fleet.jobs(view), 14, 11), (fleet.mfu_against_ofu(view), 10, 11)],
                [(row("Job $job"), 24, 1)],
                [(job.mfu_and_ofu(view), 14, 9), (job.ratio(view), 10, 9)],
                [(job.spread(view), 12, 9), (job.devices(view), 12, 9)],
                [(job.clocks(view), 12, 9), (job.device_table(view), 12, 9)],
            ]
        ),
    }
