"""A Grafana dashboard of the recorded series: its variables and its panels."""

from __future__ import annotations

from dataclasses import dataclass

from . import series
from .alerts import APART
from .grafana_panels import (
    DATA_SOURCE,
    Column,
    Json,
    Query,
    bar_gauge,
    laid_out,
    row,
    scatter,
    share,
    stat,
    table,
    time_series,
)
from .series import FleetLabels

UID = "perf-metrics-ofu"


@dataclass(frozen=True)
class View:
    """The labels of a dashboard, as its queries need them.

    Attributes:
        labels: The labels of the recorded series.
    """

    labels: FleetLabels

    @property
    def fleet(self) -> str:
        """Selects what is in the chosen clusters; nothing where there is one."""
        return f"{{{', '.join(self._clusters)}}}" if self._clusters else ""

    @property
    def job(self) -> str:
        """Selects the chosen job."""
        return f"{{{', '.join(self._of_job)}}}"

    @property
    def device(self) -> str:
        """Selects the chosen job's devices on the chosen hosts."""
        on_hosts = [*self._of_job, 'hostname=~"$host"']
        return f"{{{', '.join(on_hosts)}}}"

    @property
    def by_job(self) -> str:
        """Drops the name of a series with one value for each job, so that tables of several can be joined."""
        return f"max by ({self.labels.of_job})"

    @property
    def by_device(self) -> str:
        """The same for each device of each job."""
        return f"max by ({self.labels.of_device_in_job})"

    @property
    def _clusters(self) -> list[str]:
        return [f'{self.labels.cluster}=~"$cluster"'] if self.labels.cluster else []

    @property
    def _of_job(self) -> list[str]:
        return [*self._clusters, f'{self.labels.job}="$job"']


def legend(*labels: str | None, also: str = "") -> str:
    """Return how a series is called: by these labels, and a word."""
    return " ".join([*(f"{{{{{label}}}}}" for label in labels if label), *([also] if also else [])])


def variables(view: View) -> list[Json]:
    """Return what the reader chooses: data source, cluster where there are several, job, hosts."""
    labels = view.labels
    chosen: list[Json] = [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
        }
    ]
    if labels.cluster is not None:
        chosen.append(_several(_values("cluster", "Cluster", series.FLEET_OFU, labels.cluster)))
    chosen.append(_values("job", "Job", f"{series.JOB_GPUS}{view.fleet}", labels.job))
    chosen.append(_several(_values("host", "Host", f"{series.ACTIVITY_IN_JOB}{view.job}", "hostname")))
    return chosen


def _values(name: str, title: str, of: str, label: str) -> Json:
    query = f"label_values({of}, {label})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": query,
        # With the time range, as jobs come and go.
        "refresh": 2,
        "sort": 1,
    }


def _several(variable: Json) -> Json:
    everything: Json = {"text": ["All"], "value": ["$__all"]}
    return {**variable, "multi": True, "includeAll": True, "allValue": ".*", "current": everything}


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


def gpus(view: View) -> Json:
    """How many are in use."""
    return time_series(
        "GPUs in use",
        "GPUs and MIG slices: in a job and working, in a job without tensor activity for 15 minutes, and "
        "without a job.",
        [Query(f"{series.FLEET_GPUS}{view.fleet}", legend(view.labels.cluster, "state"))],
        _COUNT | {"min": 0},
        stacked=True,
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


_DEVICE = "{{hostname}} GPU {{gpu}} {{GPU_I_ID}}"
_MHZ: Json = {"unit": "suffix:MHz", "decimals": 0}


def mfu_and_ofu(view: View) -> Json:
    """The job over time."""
    return time_series(
        "MFU and OFU of job $job",
        "OFU at each moment, and MFU of the last log interval. MFU leaves out evaluation and saving.",
        [Query(f"{series.JOB_OFU}{view.job}", "OFU"), Query(f"{series.JOB_MFU}{view.job}", "MFU")],
        share(min=0),
        legend="table",
    )


def goodput(view: View) -> Json:
    """Where its time goes."""
    by_kind = f"sum by (kind) (rate({series.DEVICE_SECONDS}{view.job}[15m]))"
    return time_series(
        "What the time of job $job is spent on",
        "Device time of all ranks in the last 15 minutes, by kind; of jobs that give PrometheusExporter a "
        "GoodputLogger.",
        [Query(f"{by_kind} / ignoring (kind) group_left () (sum ({by_kind}) > 0)", "{{kind}}")],
        share(min=0, max=1),
        stacked=True,
    )


def goodput_now(view: View) -> Json:
    """How well it uses its time, in one figure."""
    return stat(
        "Goodput of job $job",
        "Share of steps in its device time, from its last start to the last event.",
        Query(f"{series.JOB_GOODPUT}{view.job}"),
        share(),
    )


def ratio(view: View) -> Json:
    """What a mistake in the count shows in."""
    return time_series(
        "MFU / OFU of job $job",
        "Means over the last hour. Near 1 the count of FLOPs is right. perf_metrics.diagnose tells which "
        "mistakes give another ratio, such as 0.75 for recomputation that is not counted.",
        [Query(f"{series.JOB_MFU_OVER_OFU_1H}{view.job}", "MFU / OFU")],
        {"decimals": 2, "min": 0},
    )


def spread(view: View) -> Json:
    """How even the work is."""
    of = f"{series.OFU_IN_JOB}{view.job}"
    return time_series(
        "Spread of OFU over the devices of job $job",
        "Of all its GPUs and MIG slices, on all hosts.",
        [
            Query(f"max({of})", "highest"),
            Query(f"quantile(0.9, {of})", "90 % are below"),
            Query(f"quantile(0.5, {of})", "median"),
            Query(f"quantile(0.1, {of})", "10 % are below"),
            Query(f"min({of})", "lowest"),
        ],
        share(min=0),
    )


def devices(view: View) -> Json:
    """Which device it is."""
    return time_series(
        "OFU of each device of job $job",
        "Choose hosts above, where there are many.",
        [Query(f"{series.OFU_IN_JOB}{view.device}", _DEVICE)],
        share(min=0),
        legend="table",
    )


def clocks(view: View) -> Json:
    """Who is held back."""
    return time_series(
        "SM clock of each device of job $job",
        "A device far below the others while it works is held back by heat, power or a limit, and holds up "
        "the others.",
        [Query(f"{series.SM_CLOCK_IN_JOB}{view.device}", _DEVICE)],
        _MHZ,
        legend="table",
    )


def device_table(view: View) -> Json:
    """The same in figures."""
    return table(
        "Devices of job $job",
        "Means over the last 15 minutes.",
        [
            Column("Host", label="hostname"),
            Column("GPU", label="gpu"),
            Column("Slice", label="GPU_I_ID"),
            Column("OFU", f"{view.by_device} ({series.OFU_IN_JOB_15M}{view.device})", field=share()),
            Column(
                "Tensor activity",
                f"{view.by_device} ({series.ACTIVITY_IN_JOB_15M}{view.device})",
                field=share(),
            ),
            Column("SM clock", f"{view.by_device} ({series.SM_CLOCK_IN_JOB_15M}{view.device})", field=_MHZ),
            Column("Type", label="modelName"),
        ],
        sort_by="OFU",
    )


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
                [(panel, 6, 4) for panel in present(view)],
                [(over_time(view), 8, 9), (gpus(view), 8, 9), (lowest_jobs(view), 8, 9)],
                [(jobs(view), 14, 11), (mfu_against_ofu(view), 10, 11)],
                [(row("Job $job"), 24, 1)],
                [(mfu_and_ofu(view), 14, 9), (ratio(view), 10, 9)],
                [(goodput(view), 18, 9), (goodput_now(view), 6, 9)],
                [(spread(view), 12, 9), (devices(view), 12, 9)],
                [(clocks(view), 12, 9), (device_table(view), 12, 9)],
            ]
        ),
    }
