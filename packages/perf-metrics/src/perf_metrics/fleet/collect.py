"""Reads the samples of a fleet from Prometheus, some hours at a time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from ..ofu.counter_files import CLOCK_NAME, LABEL, TENSOR_NAMES, blank_reason, device_of, present_labels
from ..ofu.samples import Device
from ..uncertainty import warn_of_rare_samples
from .job_identity import JobNames
from .job_samples import RUN_GAP_S, FleetSamples, RunLabels, check_numpy
from .prometheus_api import Progress, PrometheusAPI, RangeSeries, read_in_chunks

if TYPE_CHECKING:
    from .job_samples import Floats

    _Values: TypeAlias = tuple[Floats, Floats]
    """Unix times in seconds, ascending, and values; NaN for a blank."""


def activity_query(job_labels: Sequence[str], selector: str, step_s: float) -> str:
    """Return the expression for tensor activity of all devices that have a job.

    `last_over_time` looks back one step and no more: a plain selector would repeat the last value for
    five minutes after a job's end. It also keeps the name, as both names of the metric may be there.

    Args:
        job_labels: Labels that name the job.
        selector: Further matchers, such as `cluster="a"`, or nothing.
        step_s: Seconds between points.

    Raises:
        ValueError: A name is not one of a label.
    """
    check_labels(job_labels)
    names = "|".join(TENSOR_NAMES)
    matchers = [f'__name__=~"{names}"', *(f'{label}!=""' for label in job_labels)]
    return _last(",".join([*matchers, *([selector] if selector else [])]), step_s)


def clock_query(job_labels: Sequence[str], selector: str, step_s: float) -> str:
    """Return the expression for the SM clocks of the GPUs in `activity_query`.

    Joined by UUID alone: a MIG slice has the clock of its GPU, and that series need not have the slice's job.
    """
    matchers = [f'__name__="{CLOCK_NAME}"', *([selector] if selector else [])]
    return f"{_last(','.join(matchers), step_s)} and on (UUID) {activity_query(job_labels, selector, step_s)}"


def check_labels(labels: Sequence[str]) -> None:
    """Raise ValueError unless all are names of labels, and there is one."""
    if not labels:
        raise ValueError("job_labels is empty. Give the label that names a job, such as hpc_job.")
    for label in labels:
        if not LABEL.fullmatch(label):
            raise ValueError(f"job_label={label!r} is not the name of a label, such as hpc_job or pod.")


def _last(matchers: str, step_s: float) -> str:
    # One millisecond less than a step: up to version 2 both ends of the window belong to it.
    return f"last_over_time({{{matchers}}}[{round(step_s * 1000) - 1}ms])"


_Identity: TypeAlias = tuple[str | None, ...]

_RUN_LABELS = {"pod": ("namespace", "pod_uid"), "exported_pod": ("exported_namespace", "exported_pod_uid")}
"""Labels that part jobs of one name, where that name is one of a pod. Other jobs have several pods, and with
them these labels may be those of the exporter's own."""


@dataclass
class _Chunk:
    """What two answers about the same hours say."""

    activity: defaultdict[tuple[str, RunLabels, _Identity], list[_Values]] = field(
        default_factory=lambda: defaultdict(list)
    )
    clocks: defaultdict[_Identity, list[_Values]] = field(default_factory=lambda: defaultdict(list))
    devices: dict[_Identity, tuple[float, Device]] = field(default_factory=dict)
    points: int = 0


def collect_fleet(
    server: PrometheusAPI,
    start: float,
    end: float,
    *,
    job_labels: Sequence[str] = ("hpc_job",),
    selector: str = "",
    step_s: float = 30.0,
    tensor_mhz: float | Mapping[str, float] | None = None,
    run_labels: Sequence[str] = (),
    run_gap_s: float = RUN_GAP_S,
    names: JobNames | None = None,
    progress: Progress = lambda seconds: None,
) -> FleetSamples:
    """Return the samples of all devices that had a job between two times, by job.

    Activity and clock are multiplied for each point, so `step_s` should be the scrape interval: with a longer
    one, points are left out, which costs little accuracy up to 30 s (0.22 points at most, in "Instant GPU
    Efficiency Visibility at Fleet Scale"). Above that, time is missed: a warning and a note say so. On a
    device that jobs share, each gets the device's figure. A GPU is its UUID: series of it under several
    hosts, exporters or names of the metric are one.

    Args:
        server: Where dcgm-exporter's series are.
        start: Unix time in seconds.
        end: Unix time in seconds, after `start`.
        job_labels: Labels that name a job together; their values are joined by "/".
        selector: Further matchers for the series, such as `cluster="a"`.
        step_s: Seconds between points.
        tensor_mhz: Clock in MHz at which the tensor peak is specified, or clocks by the device's name;
            otherwise that of hardware-table.
        run_labels: Further labels that part runs of one name; `cluster` and, of a pod, its namespace and UID
            do in any case. A series without one belongs to any run.
        run_gap_s: Seconds without a sample after which the name of a job stands for another run.
        names: How jobs are named, in the place of `job_labels`.
        progress: Called with the seconds of the range that have been read more.

    Raises:
        ValueError: A setting is out of range.
        PrometheusError: The server did not give all of it.
        ModuleNotFoundError: numpy is not installed.
    """
    check_numpy()
    names = names or JobNames(job_labels)
    job_labels = names.labels
    check_labels(job_labels)
    if not start < end:
        raise ValueError(f"start={_iso(start)} must be before end={_iso(end)}.")
    if not 1 <= step_s <= 3600:
        raise ValueError(f"step_s={step_s!r} must be 1 to 3600 seconds. The scrape interval is best.")
    fleet = FleetSamples(start, end, step_s, tensor_mhz, run_gap_s, names=names)
    if (note := warn_of_rare_samples(step_s)) is not None:
        fleet.notes.append(note)
    labels = tuple(job_labels)
    parting = labels_of_runs(labels, run_labels, joins_pods=names.joins_pods)
    queries = activity_query(labels, selector, step_s), clock_query(labels, selector, step_s)
    tally = _Tally()

    def read(first: float, last: float) -> int:
        # Of its own, as a second query that is too large is asked again together with the first.
        chunk, counted = _Chunk(), _Tally()
        # One after the other: an answer takes more memory than what is kept of it.
        _read_activity(chunk, server.query_range(queries[0], first, last, step_s), names, parting, counted)
        _read_clocks(chunk, server.query_range(queries[1], first, last, step_s), counted)
        _add_chunk(fleet, chunk, counted)
        tally.add(counted)
        return chunk.points

    read_in_chunks(read, start, end, step_s, progress)
    fleet.notes.extend(tally.notes(labels))
    fleet.notes.extend(names.notes())
    fleet.notes.extend(
        f"{count} series of the server's answers are malformed and left out: {wrong}"
        for wrong, count in sorted((server.malformed + tally.strange).items())
    )
    for model, count in sorted(fleet.unknown_models.items()):
        fleet.notes.append(f"{count} samples of {model}: its tensor clock is not known; give --tensor-mhz")
    return fleet


def labels_of_runs(
    job_labels: Sequence[str], further: Sequence[str] = (), *, joins_pods: bool = False
) -> tuple[str, ...]:
    """Return the labels that part runs of a job with this name.

    Args:
        job_labels: Labels that name a job.
        further: Labels that part runs beside those that do in any case.
        joins_pods: Whether several pods may be one job: their UIDs do not part it then.

    Raises:
        ValueError: One of them is not the name of a label.
    """
    if further:
        check_labels(further)
    of_pods = (
        name
        for label in job_labels
        for name in _RUN_LABELS.get(label, ())
        if not (joins_pods and name.endswith("pod_uid"))
    )
    return tuple(name for name in dict.fromkeys(("cluster", *of_pods, *further)) if name not in job_labels)


def run_labels_of(labels: Mapping[str, str], parting: Sequence[str]) -> RunLabels:
    """Return what a series has of the labels that part runs."""
    return tuple((name, labels[name]) for name in parting if labels.get(name))


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def _read_activity(
    chunk: _Chunk,
    answer: Sequence[RangeSeries],
    names: JobNames,
    parting: Sequence[str],
    tally: _Tally,
) -> None:
    # The preferred name last, so that its values stay.
    found = _named(answer, TENSOR_NAMES, names.labels, tally)
    for series in sorted(found, key=lambda one: TENSOR_NAMES.index(one.labels["__name__"]), reverse=True):
        labels = present_labels(series.labels)
        job = names.name_of(series.labels)
        device = device_of(labels)
        if series.points:
            # What it is called last.
            named = series.points[-1][0], device
            chunk.devices[device.identity] = max(
                named, chunk.devices.get(device.identity, named), key=lambda one: one[0]
            )
        key = job, run_labels_of(series.labels, parting), device.identity
        chunk.activity[key].append(_values(series, tally, usual_most=1.0))
        chunk.points += len(series.points)


def _read_clocks(chunk: _Chunk, answer: Sequence[RangeSeries], tally: _Tally) -> None:
    for series in _named(answer, (CLOCK_NAME,), (), tally):
        identity = device_of(present_labels(series.labels)).identity
        chunk.clocks[identity].append(_values(series, tally, usual_most=10_000.0))


def _named(
    answer: Sequence[RangeSeries], names: Sequence[str], labels: Sequence[str], tally: _Tally
) -> list[RangeSeries]:
    """Return the series that are what was asked for; a server may answer as it likes."""
    found = []
    for series in answer:
        if series.labels.get("__name__") in names and all(series.labels.get(label) for label in labels):
            found.append(series)
        else:
            tally.strange["it has not the name or the labels that were asked for"] += 1
    return found


def _values(series: RangeSeries, tally: _Tally, *, usual_most: float) -> _Values:
    import numpy as np

    name = series.labels["__name__"]
    tally.points[name] += len(series.points)
    points = zip(*series.points, strict=True) if series.points else ((), ())
    times, values = (np.array([*map(float, column)]) for column in points)
    # A share above 1, perhaps in percent, is refused and counted with the others.
    most = 1e9 if usual_most == 1 else usual_most
    for place in np.flatnonzero(~((values >= 0) & (values <= most))):
        value = float(values[place])
        if (reason := blank_reason(name, value)) is not None:
            # Every wrong number would be a note of its own.
            tally.blanks[name, reason if value >= usual_most else "no value"] += 1
            values[place] = math.nan
    return times, values


def _merged(parts: Sequence[_Values]) -> _Values:
    """Return the values of several series of one thing: of each time the last that is not blank."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    times, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    # By time, blanks before values, and the later series after the earlier ones: the sort is stable.
    order = np.lexsort((~np.isnan(values), times))
    is_last = np.concatenate((np.diff(times[order]) > 0, np.ones(min(1, len(times)), bool)))
    return times[order][is_last], values[order][is_last]


def _at(times: Floats, clock: _Values | None) -> Floats:
    """Return the values of a clock at these times; NaN where there is none."""
    import numpy as np

    if clock is None or not len(clock[0]):
        return np.full(len(times), math.nan)
    own, values = clock
    places = np.searchsorted(own, times).clip(max=len(own) - 1)
    return np.where(own[places] == times, values[places], math.nan)


def _add_chunk(fleet: FleetSamples, chunk: _Chunk, tally: _Tally) -> None:
    import numpy as np

    # The work of slices is in the series of their GPU too: of a job that has both, the slices count.
    devices = {identity: device for identity, (_, device) in chunk.devices.items()}
    sliced = {
        (job, _whole(devices[identity]))
        for job, _, identity in chunk.activity
        if identity in devices and devices[identity].is_slice
    }
    clocks = {identity: _merged(parts) for identity, parts in chunk.clocks.items()}
    for (job, labels, identity), parts in chunk.activity.items():
        times, activity = _merged(parts)
        if not len(times) or (not (device := devices[identity]).is_slice and (job, identity) in sliced):
            continue
        mhz = _at(times, clocks.get(identity))
        if device.is_slice:
            mhz = np.where(np.isnan(mhz), _at(times, clocks.get(_whole(device))), mhz)
        tally.samples += len(times)
        tally.without_clock += int(np.isnan(mhz).sum())
        fleet.add_series(job, device, times, activity, mhz, labels)


def _whole(device: Device) -> _Identity:
    return Device(device.host, device.index, device.uuid, device.model).identity


@dataclass
class _Tally:
    points: Counter[str] = field(default_factory=Counter)
    blanks: Counter[tuple[str, str]] = field(default_factory=Counter)
    strange: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    without_clock: int = 0

    def add(self, other: _Tally) -> None:
        self.points += other.points
        self.blanks += other.blanks
        self.strange += other.strange
        self.samples += other.samples
        self.without_clock += other.without_clock

    def notes(self, job_labels: Sequence[str]) -> Iterator[str]:
        activity = sum(self.points[name] for name in TENSOR_NAMES)
        if not activity:
            yield (
                f"no series {' or '.join(reversed(TENSOR_NAMES))} with the label {', '.join(job_labels)}: "
                "does dcgm-exporter export it (by default since 4.0.0), and which label names the job "
                "(--job-label)?"
            )
        elif not self.points[CLOCK_NAME]:
            yield f"no series {CLOCK_NAME}: without the SM clock there is no OFU"
        for (name, meaning), count in sorted(self.blanks.items()):
            yield f"{name}: {count:,} of {self.points[name]:,} points are blank ({meaning})"
        if self.without_clock and self.points[CLOCK_NAME]:
            counted = f"{self.without_clock:,} of {self.samples:,} samples"
            yield f"{counted} have no SM clock beside tensor activity"
