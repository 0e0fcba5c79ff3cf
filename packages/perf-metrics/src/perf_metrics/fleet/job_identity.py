"""Which job a series is of, and whose it is: by patterns, Slurm's accounts and labels of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        ValueError: `pattern` is not a regular expression, or has neither group.
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
        self.unknown: dict[str, None] = {}
        """Names of jobs that neither Slurm nor Kubernetes told of, where they were asked."""
        self.contradicting: dict[str, None] = {}
        """Jobs that were joined from those of several users."""

    @property
    def joins_pods(self) -> bool:
        """Whether several pods may be one job, which their own UIDs must not part."""
        return bool(self._pods) or (self._pattern is not None and "job" in self._pattern.groupindex)

    def name_of(self, labels: Mapping[str, str]) -> str:
        """Return the name of the job of a series that has the labels."""
        name = "/".join(labels[label] for label in self.labels)
        found = self._of_pod(labels) or self._of_slurm(labels, name)
        if found is None and (self._slurm or self._pods):
            self.unknown[name] = None
        job, run = name if found is None else found.job, None if found is None else found.run
        if self._pattern is not None:
            match = self._pattern.search(name)
            if match is None:
                self.unmatched[name] = None
            else:
                told = match.groupdict()
                job, run = told.get("job") or job, told.get("run") or run
        known = self._known.get(job, JobIdentity(job))
        user, account = (None, None) if found is None else (found.user, found.account)
        # Of a job that was joined from several: what the first ones that tell it say.
        self._known[job] = JobIdentity(job, known.run or run, known.user or user, known.account or account)
        if user is not None and known.user not in (None, user):
            self.contradicting[job] = None
        return job

    def identity(self, job: str) -> JobIdentity:
        """Return what is known of a job that `name_of` has named."""
        return self._known.get(job, JobIdentity(job))

    def notes(self) -> Iterator[str]:
        """What could not be joined, in sentences."""
        for names, what in (
            (self.unmatched, "names of jobs do not match the job pattern, and stay as they are"),
            (self.unknown, "jobs are not among those that Slurm or Kubernetes told of"),
            (self.contradicting, "jobs were joined from those of several users, and count for the first"),
        ):
            if names:
                yield f"{len(names)} {what}, such as {next(iter(names))}"

    def _of_slurm(self, labels: Mapping[str, str], name: str) -> JobIdentity | None:
        """By the whole name, or else by the one label whose value is an id."""
        found = [
            each
            for value in (name, *(labels[one] for one in self.labels))
            if (each := self._slurm.get(value))
        ]
        return replace(found[0], job=name) if found else None

    def _of_pod(self, labels: Mapping[str, str]) -> JobIdentity | None:
        if not self._pods:
            return None
        return self._pods.get(_namespace_and_pod(labels))


def _namespace_and_pod(labels: Mapping[str, str]) -> tuple[str, str]:
    """Those that a series is about: where the scraped pod's own labels win, they are `exported_` ones."""
    namespace, pod = (
        next((labels[name] for name in names if labels.get(name)), "") for names in (_NAMESPACE, _POD)
    )
    return namespace, pod


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
        ValueError: It is not such a file, or an id is there for two jobs, as of two clusters.
    """
    twice: str | None = None
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        found: dict[str, JobIdentity] = {}
        for job in jobs:
            user, account = _text(job.get("user")), _text(job.get("account"))
            name = _text(job.get("name"))
            run = "/".join(part for part in (user, name) if part) or None
            array = job.get("array") or {}
            own, whole, task = (
                _number(value) for value in (job["job_id"], array.get("job_id"), array.get("task_id"))
            )
            if own is None:
                raise ValueError(f"job_id={job['job_id']!r} is not a number")
            for each in (str(own), *([f"{whole}_{task}"] if whole and task is not None else [])):
                identity = JobIdentity(each, run, user, account)
                if found.setdefault(each, identity) != identity:
                    twice = each
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not what `sacct --json` writes, an object with a list of jobs: {error!r}."
        ) from None
    if twice is not None:
        raise ValueError(
            f"{path} has job {twice} of two users or names. Write the jobs of one cluster (sacct --cluster), "
            "and report on each with its own --selector."
        )
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
        ValueError: The series is missing, or has no label of a job.
        PrometheusError: The server did not give all of it.
    """
    labels = ", ".join((*_NAMESPACE, *_POD, *_KUBE_JOBS, *_KUBE_QUEUES))
    window = max(1, round(end - start))
    query = f"count by ({labels}) (last_over_time(kube_pod_labels[{window}s]))"
    series = server.query_range(query, end, end, 60.0)
    found: dict[tuple[str, str], JobIdentity] = {}
    for each in series:
        namespace, pod = _namespace_and_pod(each.labels)
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
