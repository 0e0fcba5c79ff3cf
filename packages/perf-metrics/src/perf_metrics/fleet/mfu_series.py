"""MFU that jobs report into the same Prometheus."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .applications import Application, check_mfu
from .chunks import Progress, read_in_chunks
from .job_samples import FleetSamples
from .prometheus_api import PrometheusAPI


def mfu_from_series(
    server: PrometheusAPI,
    query: str,
    fleet: FleetSamples,
    *,
    job_labels: Sequence[str] = ("hpc_job",),
    progress: Progress = lambda seconds: None,
) -> dict[str, Application]:
    """Return the mean MFU of each job over the time in which its devices were seen, and when it told it.

    OFU is compared over the times at which a job told MFU, so that its start does not count. How many jobs
    were found is added to the notes of `fleet`.

    Args:
        server: Where the series are.
        query: PromQL for MFU as a share, with the labels of the job, such as `training_mfu_ratio`. Several
            series of one job, such as one for each rank, are averaged.
        fleet: The jobs and their times.
        job_labels: Labels that name a job together, as for the fleet.
        progress: Called with the seconds that have been read more.

    Raises:
        ValueError: The series have not the labels, or are not shares.
        PrometheusError: The server did not give all of it.
    """
    runs = fleet.runs()
    told: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    names: dict[str, None] = {}

    def read(first: float, last: float) -> int:
        answer = server.query_range(query, first, last, fleet.step_s)
        for series in answer:
            names[job := _job(series.labels, job_labels, query)] = None
            for name, run in runs.get(job, {}).items():
                begin, end = run.window() or (math.inf, -math.inf)
                if all(series.labels.get(label, value) == value for label, value in run.labels):
                    told[name].extend(
                        (time_s, float(text)) for time_s, text in series.points if begin <= time_s <= end
                    )
        return sum(len(series.points) for series in answer)

    read_in_chunks(read, fleet.start, fleet.end, fleet.step_s, progress)
    fleet.notes.append(_note(query, names, runs))
    finite = {job: [one for one in points if math.isfinite(one[1])] for job, points in told.items()}
    return {job: _application(points, job, query) for job, points in finite.items() if points}


def _note(query: str, names: Mapping[str, object], runs: Mapping[str, object]) -> str:
    strangers = [job for job in names if job not in runs]
    some = f", such as {strangers[0]}" if strangers else ""
    return (
        f"{query}: {len(names)} jobs tell MFU; {len(strangers)} of them have no counters in this time{some}"
    )


def _application(points: Sequence[tuple[float, float]], job: str, query: str) -> Application:
    mfu = _mean([value for _, value in points], job, query)
    return Application(mfu, times=frozenset(round(time_s, 3) for time_s, _ in points))


def _job(labels: Mapping[str, str], job_labels: Sequence[str], query: str) -> str:
    for label in job_labels:
        if not labels.get(label):
            raise ValueError(
                f"mfu_query={query!r}: its series lack the label {label}, by which the jobs are named; they "
                f"have {', '.join(labels) or 'none'}"
            )
    return "/".join(labels[label] for label in job_labels)


def _mean(values: Sequence[float], job: str, query: str) -> float | None:
    try:
        return check_mfu(math.fsum(values) / len(values))
    except ValueError as error:
        raise ValueError(
            f"mfu_query={query!r}, job {job}: {error}; divide by 100 if it is in percent"
        ) from None
