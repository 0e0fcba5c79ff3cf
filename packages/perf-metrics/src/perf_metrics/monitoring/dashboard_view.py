"""What the dashboard's panels have in common: what the reader chooses, and what selects that."""

from __future__ import annotations

from dataclasses import dataclass

from . import recorded_series as series
from .grafana_panels import DATA_SOURCE, Json
from .recorded_series import FleetLabels

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
