"""Which job a series is of, and whose it is: by patterns, Slurm's accounts and labels of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .prometheus_api import PrometheusAPI

NO_USER = "unknown"
_KUBE_JOBS = (
    "label_jobset_sigs_k8s_io_jobset_name",
    "label_training_kubeflow_org_job_name",
    "label_batch_kubernetes_io_job_name",
    "label_job_name",
)
"""Labels of pods that name their job, as kube-state-metrics has them, the outermost first: a pod of a JobSet
has the name of its Job too."""
_KUBE_QUEUES = ("label_kueue_x_k8s_io_queue_name",)
_POD, _NAMESPACE = ("exported_pod", "pod"), ("exported_namespace", "namespace")


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Whose job it is, and of what run; None is unknown.

    Attributes:
        job: Its name in the report.
        run: Name of the workload, the same over jobs that continue one another.
        user: Who is billed for it.
        account: Slurm's account, or Kueue's queue.
    """

    job: str
    run: str | None = None
    user: str | None = None
    account: str | None = None


class JobNames:
    """Names the jobs of series: those of one job alike, whatever its pods and restarts are called.

    Args:
        labels: Labels whose values name a job, joined by "/".
        pattern: A regular expression that is searched for in that name. Its group `job` names the job: series
            with the same are of one, such as with `^(?P<job>.+)-worker-[0-9]+$`. Its group `run` names the
            workload, over jobs.
        slurm: Identities by job id, from `read_sacct`.
        pods: Identities by namespace and pod, from `read_pod_labels`.

    Raises:
        ValueError: `pattern` is no regular expression, or has neither group.
    """

    def __init__(
        self,
        labels: Sequence[str],
        *,
        pattern: str | None = None,
        slurm: Mapping[str, JobIdentity] | None = None,
        pods: Mapping[tuple[str, str], JobIdentity] | None = None,
    ) -> None:
        self.labels = tuple(labels)
        self._pattern = None if pattern is None else _compiled(pattern)
        self._slurm, self._pods = slurm or {}, pods or {}
        self._known: dict[str, JobIdentity] = {}
        self.unmatched: dict[str, None] = {}
        """Names that the pattern does not match."""

    @property
    def joins_pods(self) -> bool:
        """Whether several pods may be one job, which their own UIDs must not part."""
        return bool(self._pods) or (self._pattern is not None and "job" in self._pattern.groupindex)

    def name_of(self, labels: Mapping[str, str]) -> str:
        """Return the name of the job of a series that has the labels."""
        name = "/".join(labels[label] for label in self.labels)
        found = self._of_pod(labels) or self._slurm.get(name)
        job, run = name if found is None else found.job, None if found is None else found.run
        if self._pattern is not None:
            match = self._pattern.search(name)
            if match is None:
                self.unmatched[name] = None
            else:
                told = match.groupdict()
                job, run = told.get("job") or job, told.get("run") or run
        if job not in self._known:
            user, account = (None, None) if found is None else (found.user, found.account)
            self._known[job] = JobIdentity(job, run, user, account)
        return job

    def identity(self, job: str) -> JobIdentity:
        """Return what is known of a job that `name_of` has named."""
        return self._known.get(job, JobIdentity(job))

    def _of_pod(self, labels: Mapping[str, str]) -> JobIdentity | None:
        if not self._pods:
            return None
        pod, namespace = (
            next((labels[name] for name in names if labels.get(name)), "") for names in (_POD, _NAMESPACE)
        )
        return self._pods.get((namespace, pod))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"job_pattern={pattern!r} is not a regular expression: {error}.") from None
    if not {"job", "run"} & set(compiled.groupindex):
        raise ValueError(
            f"job_pattern={pattern!r} names neither a job nor a run. Give it a group, such as "
            r"'^(?P<job>.+)-worker-\d+$'."
        )
    return compiled


def read_sacct(path: Path) -> dict[str, JobIdentity]:
    """Read the identities of jobs by their id from what `sacct --json` writes.

    The run of a job is its user and its name. A job that was queued again keeps its id. A task of an array is
    there by its own id, and by that of the array, such as 100_7.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file.
    """
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        found: dict[str, JobIdentity] = {}
        for job in jobs:
            user, account = _text(job.get("user")), _text(job.get("account"))
            name = _text(job.get("name"))
            run = "/".join(part for part in (user, name) if part) or None
            array = job.get("array") or {}
            task = _number(array.get("task_id"))
            ids = [str(job["job_id"])]
            if array.get("job_id") and task is not None:
                ids.append(f"{array['job_id']}_{task}")
            found |= {each: JobIdentity(each, run, user, account) for each in ids}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not what `sacct --json` writes, an object with a list of jobs: {error!r}."
        ) from None
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    """A number as Slurm writes it: alone, or as an object that says whether it is set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_pod_labels(server: PrometheusAPI, start: float, end: float) -> dict[tuple[str, str], JobIdentity]:
    """Read the jobs of pods from `kube_pod_labels`, which kube-state-metrics exports.

    A job is a JobSet, a job of Kubeflow's trainer (PyTorchJob, MPIJob) or a Job, in this order; its name is
    that of the namespace and its own. kube-state-metrics exports the labels that `--metric-labels-allowlist`
    names.

    Args:
        server: Where the series are.
        start: Unix time in seconds.
        end: Unix time in seconds.

    Returns:
        Identities by namespace and pod; the namespace is the user.

    Raises:
        ValueError: There is no such series, or none with a label of a job.
        PrometheusError: The server did not give all of it.
    """
    labels = ", ".join(("namespace", "pod", *_KUBE_JOBS, *_KUBE_QUEUES))
    window = max(1, round(end - start))
    query = f"count by ({labels}) (last_over_time(kube_pod_labels[{window}s]))"
    series = server.query_range(query, end, end, 60.0)
    found: dict[tuple[str, str], JobIdentity] = {}
    for each in series:
        namespace, pod = each.labels.get("namespace", ""), each.labels.get("pod", "")
        job = next((each.labels[name] for name in _KUBE_JOBS if each.labels.get(name)), None)
        if job is not None:
            account = next((each.labels[name] for name in _KUBE_QUEUES if each.labels.get(name)), None)
            name = f"{namespace}/{job}"
            found[namespace, pod] = JobIdentity(name, name, namespace or None, account)
    if not found:
        raise ValueError(
            f"kube_pod_labels has {len(series)} series in this time and none with a label of a job. Let "
            "kube-state-metrics export them: --metric-labels-allowlist="
            "pods=[jobset.sigs.k8s.io/jobset-name,training.kubeflow.org/job-name,kueue.x-k8s.io/queue-name]."
        )
    return found
