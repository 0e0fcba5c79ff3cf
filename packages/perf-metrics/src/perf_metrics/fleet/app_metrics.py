"""MFU that jobs report, from a file or from Prometheus, and how well it agrees with OFU."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import StatisticsError, correlation, fmean, stdev

from ..display import hint
from ..ofu.diagnosis import MIXED, RATES, JobFacts
from .job_identity import JobNames
from .job_samples import FleetSamples
from .prometheus_api import Progress, PrometheusAPI, read_in_chunks

_MOST_MFU = 3.0
"""A wrong count gives two or three times too much; more than that is taken for percent."""
_FACTS = {one.name: str(one.type) for one in fields(JobFacts) if one.name not in ("findings", "usual_ofu")}
_COLUMNS = ("job", "mfu", "mfu_percent", "run", "gpus", *_FACTS)
_DTYPES = {"compute_dtype": (*RATES,), "peak_dtype": (*RATES, MIXED)}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True)
class Application:
    """What one job says of itself; None is unknown.

    Attributes:
        mfu: As a share.
        run: Name of the workload, the same over restarts.
        gpus: Number of GPUs of the job.
        facts: What sharpens a diagnosis.
        times: Unix times at which it told MFU, in seconds, to the millisecond; None: it holds for all of it.
        notes: What it says that is not used, in sentences.
        mfu_at: MFU as a share at each of `times`; None where only the mean is known.

    Raises:
        ValueError: `mfu` is not a share.
    """

    mfu: float | None
    run: str | None = None
    gpus: int | None = None
    facts: JobFacts = field(default_factory=JobFacts)
    times: frozenset[float] | None = None
    notes: tuple[str, ...] = ()
    mfu_at: Mapping[float, float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_mfu(self.mfu)


def read_applications(path: Path) -> dict[str, Application]:
    """Read what jobs report from a .csv file with a header, or a .json file with a list of objects.

    Columns: `job`; `mfu` as a share or `mfu_percent`; and, where known, `run`, `gpus` and the fields of
    `JobFacts`. An empty field or null is unknown. `compute_shares` is text such as `fp8:0.7 bf16:0.3`, or in
    JSON an object such as `{"fp8": 0.7, "bf16": 0.3}`.

    Raises:
        OSError: The file cannot be read.
        ValueError: A column is unknown, a job is there twice, or a value is not of its kind; names the row.
    """
    applications: dict[str, Application] = {}
    try:
        rows = list(_rows(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}.") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a table: {error}.") from None
    if not rows:
        raise ValueError(f"{path} has no job. Give one row a job below the header.")
    for where, row in rows:
        _check_columns(row, where)
        job = _text(row.get("job"))
        if isinstance(row.get("job"), list | dict):
            raise ValueError(f"{where}: job={row['job']!r} must be text.")
        if job is None:
            raise ValueError(f"{where} has no job.")
        if job in applications:
            raise ValueError(f"{where}: job={job!r} is there twice. Give one row a job.")
        try:
            applications[job] = _application(row)
        except ValueError as error:
            raise ValueError(f"{where}, job {job}: {error}") from None
    return applications


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as lines:
            for row in (reader := csv.DictReader(lines)):
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} does not have as many fields as the header.")
                yield where, row
        return
    if path.suffix.lower() != ".json":
        raise ValueError(f"mfu={str(path)!r} must be a .csv or a .json file.")
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets within brackets, by thousands
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must be a list of objects, one for each job.")
    for number, entry in enumerate(entries, start=1):
        yield f"{path}, entry {number}", entry


def _check_columns(row: Mapping[str, object], where: str) -> None:
    for column in row:
        if column not in _COLUMNS:
            raise ValueError(f"{where}: unknown column {column!r}.{hint(str(column), _COLUMNS)}")


def _application(row: Mapping[str, object]) -> Application:
    facts = {name: value for name in _FACTS if (value := _fact(name, row.get(name))) is not None}
    # A type without a rate takes nothing from the report but a sharper diagnosis of this one job.
    strange = [name for name, known in _DTYPES.items() if name in facts and facts[name] not in known]
    notes = tuple(
        f"{name}={facts.pop(name)!r} is none of {', '.join(RATES)} and is taken as unknown"
        for name in strange
    )
    gpus = _number("gpus", row.get("gpus"))
    if gpus is not None and (gpus < 1 or gpus != int(gpus)):
        raise ValueError(f"gpus={gpus:g} must be a whole number of 1 or more.")
    return Application(
        _mfu(row),
        _text(row.get("run")),
        None if gpus is None else int(gpus),
        JobFacts(**facts),  # type: ignore[arg-type]  # each of its field's kind
        notes=notes,
    )


def _mfu(row: Mapping[str, object]) -> float | None:
    share, percent = _number("mfu", row.get("mfu")), _number("mfu_percent", row.get("mfu_percent"))
    if share is not None and percent is not None:
        raise ValueError("give mfu or mfu_percent, not both.")
    return check_mfu(percent / 100 if percent is not None else share)


def check_mfu(value: float | None) -> float | None:
    """Return an application's MFU, or None.

    Raises:
        ValueError: It is not a share.
    """
    if value is not None and not 0 <= value < _MOST_MFU:
        raise ValueError(f"mfu={value:g} must be a share, such as 0.42 for 42 %.")
    return value


def _fact(name: str, value: object) -> object:
    kind = _FACTS[name]
    if "Mapping" in kind:
        return _shares(name, value)
    if "bool" in kind:
        return _truth(name, value)
    if "str" in kind:
        return _text(value)
    number = _number(name, value)
    return int(number) if number is not None and "int" in kind else number


def _shares(name: str, value: object) -> dict[str, float] | None:
    """Read shares by type; whether they are of known types and add up to 1, `JobFacts` checks."""
    if isinstance(value, Mapping):
        pairs = [(str(key), share) for key, share in value.items()]
    elif (text := _text(value)) is None:
        return None
    else:
        words = [word.partition(":") for word in text.split()]
        if not all(colon for _, colon, _ in words):
            raise ValueError(f"{name}={text!r} must be a type and its share each, such as fp8:0.7 bf16:0.3.")
        pairs = [(key, share) for key, _, share in words]
    shares: dict[str, float] = {}
    for key, share in pairs:
        if key in shares:
            raise ValueError(f"{name} has {key} twice. Give each type once.")
        number = _number(f"{name} of {key}", share)
        if number is None:
            raise ValueError(f"{name} has no share of {key}. Give it, such as {key}:0.3.")
        shares[key] = number
    return shares


def _text(value: object) -> str | None:
    return None if value is None or not str(value).strip() else str(value).strip()


def _number(name: str, value: object) -> float | None:
    text = _text(value)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number.") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={text!r} must be a finite number, or empty where it is not known.")
    return number


def _truth(name: str, value: object) -> bool | None:
    text = _text(value)
    if text is None:
        return None
    for words, truth in ((_TRUE, True), (_FALSE, False)):
        if text.lower() in words:
            return truth
    raise ValueError(f"{name}={text!r} must be true or false, or empty where it is not known.")


def mfu_from_series(
    server: PrometheusAPI,
    query: str,
    fleet: FleetSamples,
    *,
    job_labels: Sequence[str] = ("hpc_job",),
    names: JobNames | None = None,
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
        names: How jobs are named, in the place of `job_labels`, as for the fleet.
        progress: Called with the seconds that have been read more.

    Raises:
        ValueError: The series have not the labels, or are not shares.
        PrometheusError: The server did not give all of it.
    """
    runs = fleet.runs()
    told: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    told_by: dict[str, None] = {}
    names = names or JobNames(job_labels)

    def read(first: float, last: float) -> int:
        answer = server.query_range(query, first, last, fleet.step_s)
        for series in answer:
            told_by[job := _job(series.labels, names, query)] = None
            for name, run in runs.get(job, {}).items():
                begin, end = run.window() or (math.inf, -math.inf)
                if all(series.labels.get(label, value) == value for label, value in run.labels):
                    told[name].extend(
                        (time_s, float(text)) for time_s, text in series.points if begin <= time_s <= end
                    )
        return sum(len(series.points) for series in answer)

    read_in_chunks(read, fleet.start, fleet.end, fleet.step_s, progress)
    fleet.notes.append(_note(query, told_by, runs))
    finite = {job: [one for one in points if math.isfinite(one[1])] for job, points in told.items()}
    return {job: _application_of_points(points, job, query) for job, points in finite.items() if points}


def _note(query: str, names: Mapping[str, object], runs: Mapping[str, object]) -> str:
    strangers = [job for job in names if job not in runs]
    some = f", such as {strangers[0]}" if strangers else ""
    return (
        f"{query}: {len(names)} jobs tell MFU; {len(strangers)} of them have no counters in this time{some}"
    )


def _application_of_points(points: Sequence[tuple[float, float]], job: str, query: str) -> Application:
    mfu = _mean([value for _, value in points], job, query)
    told: defaultdict[float, list[float]] = defaultdict(list)
    for time_s, value in points:
        told[round(time_s, 3)].append(value)
    mfu_at = {time_s: fmean(values) for time_s, values in told.items()}
    return Application(mfu, times=frozenset(mfu_at), mfu_at=mfu_at)


def _job(labels: Mapping[str, str], names: JobNames, query: str) -> str:
    for label in names.labels:
        if not labels.get(label):
            raise ValueError(
                f"mfu_query={query!r} has series without the label {label}, by which the jobs are named. "
                f"They have {', '.join(labels) or 'none'}."
            )
    return names.name_of(labels)


def _mean(values: Sequence[float], job: str, query: str) -> float | None:
    try:
        return check_mfu(math.fsum(values) / len(values))
    except ValueError as error:
        raise ValueError(
            f"mfu_query={query!r}, job {job}: {error} Divide by 100 if it is in percent."
        ) from None


NEAR_POINTS = 10.0
FAR_POINTS = 20.0
_MOST_BUCKETS = 16


@dataclass(frozen=True)
class Pair:
    """MFU and OFU of one job as shares, and its number of GPUs."""

    mfu: float
    ofu: float
    gpus: int

    @property
    def points(self) -> float:
        """MFU - OFU in percentage points."""
        return 100 * (self.mfu - self.ofu)


@dataclass(frozen=True)
class Agreement:
    """How well MFU and OFU of some jobs agree; the figures of the publication's table.

    Attributes:
        gpus: Number of GPUs of the jobs, such as "8", "129-256", or "all".
        jobs: Number of jobs.
        correlation: Pearson's; None for fewer than three jobs, or where one of the two does not vary.
        mae_points: Mean of |MFU - OFU| in percentage points.
        sd_points: Standard deviation of |MFU - OFU| in points; None for one job.
        bias_points: Mean of MFU - OFU in points.
        within_10: Share of the jobs within 10 points.
        beyond_20: Share of the jobs more than 20 points apart.
        mfu_mean: Mean MFU as a share.
        mfu_sd: Its standard deviation; None for one job.
        ofu_mean: Mean OFU as a share.
    """

    gpus: str
    jobs: int
    correlation: float | None
    mae_points: float
    sd_points: float | None
    bias_points: float
    within_10: float
    beyond_20: float
    mfu_mean: float
    mfu_sd: float | None
    ofu_mean: float


def agreement(pairs: Sequence[Pair], gpus: str = "all") -> Agreement | None:
    """Return how well MFU and OFU of these jobs agree; None without jobs."""
    if not pairs:
        return None
    apart = [abs(pair.points) for pair in pairs]
    mfu, ofu = [pair.mfu for pair in pairs], [pair.ofu for pair in pairs]
    return Agreement(
        gpus=gpus,
        jobs=len(pairs),
        correlation=_correlation(mfu, ofu),
        mae_points=fmean(apart),
        sd_points=_deviation(apart),
        bias_points=fmean(pair.points for pair in pairs),
        within_10=sum(points <= NEAR_POINTS for points in apart) / len(pairs),
        beyond_20=sum(points > FAR_POINTS for points in apart) / len(pairs),
        mfu_mean=fmean(mfu),
        mfu_sd=_deviation(mfu),
        ofu_mean=fmean(ofu),
    )


def agreement_by_gpus(pairs: Sequence[Pair]) -> tuple[Agreement, ...]:
    """Return the agreement for each number of GPUs, or for powers of two where there are many numbers."""
    counts = {pair.gpus for pair in pairs}
    bucket_of: Callable[[int], tuple[int, int]] = (
        (lambda gpus: (gpus, gpus)) if len(counts) <= _MOST_BUCKETS else _power_of_two
    )
    buckets: defaultdict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        buckets[bucket_of(pair.gpus)].append(pair)
    found = (agreement(buckets[bucket], _bucket_name(*bucket)) for bucket in sorted(buckets))
    return tuple(one for one in found if one is not None)


def _power_of_two(gpus: int) -> tuple[int, int]:
    high = 1 << (gpus - 1).bit_length()
    return high // 2 + 1, high


def _bucket_name(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 3:
        return None
    try:
        value = correlation(first, second)
    except StatisticsError:  # one of the two is constant
        return None
    return value if math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
