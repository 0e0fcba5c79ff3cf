"""Reads counters from files of dcgm-exporter, `dcgmi dmon` and Nsight Systems."""

from __future__ import annotations

import math
import os
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ..uncertainty import warn_of_rare_samples
from .cycles import activity_from_cycles
from .samples import Device, Job, Readings, Sample, check_activity

TENSOR_NAMES = ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
"""Field 1004, since DCGM 4.6.0 and before; the old name stays as an alias (`dcgmlib/dcgm_fields.h`)."""
CLOCK_NAME = "DCGM_FI_DEV_SM_CLOCK"
"""Field 100, SM clock in MHz."""
CYCLE_NAMES = ("DCGM_FI_PROF_SM_CYCLES_ELAPSED_TOTAL", "DCGM_FI_PROF_MMA_CYCLES_ACTIVE_TOTAL")
"""Fields 1084 and 1086, running counts, since DCGM 4.6.0; to be added to the CSV file of dcgm-exporter."""
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
"""The name of a label, to Prometheus."""
JOB_LABELS = ("hpc_job", "namespace", "pod", "container")
"""Labels of dcgm-exporter that say who uses a device."""

_OLD_LABELS = {
    "Hostname": "hostname",
    "pod_name": "pod",
    "pod_namespace": "namespace",
    "container_name": "container",
}
"""`Hostname` until May 2026; the others with `--use-old-namespace` (const.go of dcgm-exporter)."""

_BLANKS = (0x7FFFFFF0, 1 << 47, 0x7FFFFFFFFFFFFFF0)
"""From here upwards a value is a blank of its type: 32 bits, double, 64 bits (`dcgm_structs.h`)."""
_LEAST_COUNT_BLANK = _BLANKS[-1]
"""Of a running count, which exceeds the others (DCGM itself excepts them, in `DcgmCacheManager.cpp`)."""
_BLANK_MEANINGS = ("blank", "not found", "not supported", "not permitted")


def read_exporter(
    text: str, *, time_s: float | None = None, job_labels: Sequence[str] = JOB_LABELS
) -> Readings:
    """Read one answer of dcgm-exporter.

    Where jobs share a device, dcgm-exporter repeats its series once per job. Such a reading becomes one
    sample with several jobs, so that it is averaged once per device and once per job.

    Cycle counters (fields 1084 and 1086) are kept in the samples. They tell something from one answer to the
    next: pass the samples of several answers to `activity_from_cycles`, as is done here for the times of one.

    Args:
        text: What `/metrics` answered; needs the extra `prometheus`.
        time_s: Unix time of the answer in seconds, for series without a time stamp.
        job_labels: Labels to keep that say who uses the device, by their present names.

    Returns:
        One sample per device and time, with notes on what is missing or was left out.

    Raises:
        ModuleNotFoundError: The extra `prometheus` is not installed.
        ValueError: A line of one of the metrics that are read is not of the format.
    """
    scrape = _Scrape(time_s, tuple(job_labels))
    for name, labels, value, time in _series(text, scrape):
        scrape.add(name, labels, value, time)
    counted = activity_from_cycles(scrape.samples())
    return Readings(counted.samples, (*scrape.notes(), *counted.notes))


@dataclass
class _Reading:
    values: dict[str, float] = field(default_factory=dict)
    jobs: dict[Job, None] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)


@dataclass
class _Scrape:
    time_s: float | None
    job_labels: tuple[str, ...]
    readings: defaultdict[tuple[Device, float | None], _Reading] = field(
        default_factory=lambda: defaultdict(_Reading)
    )
    names: Counter[str] = field(default_factory=Counter)
    blanks: Counter[tuple[str, str]] = field(default_factory=Counter)
    borrowed: int = 0
    differing: int = 0

    def add(self, name: str, raw: Mapping[str, str], value: float, time: float | None) -> None:
        labels = present_labels(raw)
        reading = self.readings[device_of(labels), self.time_s if time is None else time]
        job = Job.of({key: labels[key] for key in self.job_labels if key in labels})
        if job is not None:
            reading.jobs[job] = None
        self.names[name] += 1
        meaning = blank_reason(name, value)
        if meaning is not None:
            self.blanks[name, meaning] += 1
        elif reading.values.setdefault(name, value) != value:
            reading.conflicts.add(name)

    def samples(self) -> Iterator[Sample]:
        # Two jobs of one device have the same reading; if not, it is not known which one is right.
        clocks = {key: self._value(reading, CLOCK_NAME) for key, reading in self.readings.items()}
        for (device, time), reading in self.readings.items():
            activity = next(
                (v for v in (self._value(reading, name) for name in TENSOR_NAMES) if v is not None), None
            )
            clock = clocks[device, time]
            whole = Device(device.host, device.index, device.uuid, device.model)
            if clock is None and device.is_slice and clocks.get((whole, time)) is not None:
                clock = clocks[whole, time]
                self.borrowed += 1
            if activity is None and not device.is_slice and self._has_slices(device, time):
                continue
            self.differing += len(reading.conflicts)
            elapsed, tensor = (self._value(reading, name) for name in CYCLE_NAMES)
            yield Sample(device, activity, clock, time, tuple(reading.jobs), elapsed, tensor)

    def _value(self, reading: _Reading, name: str) -> float | None:
        return None if name in reading.conflicts else reading.values.get(name)

    def _has_slices(self, whole: Device, time: float | None) -> bool:
        return any(
            device.is_slice
            and (device.host, device.index, device.uuid) == (whole.host, whole.index, whole.uuid)
            for device, at in self.readings
            if at == time
        )

    def notes(self) -> Iterator[str]:
        if not any(name in self.names for name in TENSOR_NAMES):
            yield (
                f"no series {TENSOR_NAMES[1]} or {TENSOR_NAMES[0]}: before 4.0.0 dcgm-exporter exports it "
                "with dcp-metrics-included.csv only"
            )
        if CLOCK_NAME not in self.names:
            yield f"no series {CLOCK_NAME}: without the SM clock there is no OFU"
        for (name, meaning), count in self.blanks.items():
            yield f"{name}: {count} of {self.names[name]} series are blank ({meaning})"
        if self.differing:
            yield f"{self.differing} readings differ between the series of one device and were left out"
        if self.borrowed:
            yield f"{self.borrowed} slices have no clock of their own and take that of their GPU"
        if any(len(reading.jobs) > 1 for reading in self.readings.values()):
            yield "jobs share a device: the counters are the device's, so each of them gets the same figure"


def _series(text: str, scrape: _Scrape) -> Iterator[tuple[str, Mapping[str, str], float, float | None]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading dcgm-exporter needs prometheus-client. Install it with `pip install "
            "'perf-metrics[prometheus]'`."
        ) from error
    wanted = (*TENSOR_NAMES, CLOCK_NAME, *CYCLE_NAMES)
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.partition("{")[0].split(" ")[0]
        if name not in wanted:
            continue
        if line.rstrip().endswith("}"):
            scrape.names[name] += 1
            scrape.blanks[name, "no value"] += 1
            continue
        try:
            # Line by line, so that one bad line can be named.
            samples = [s for family in text_string_to_metric_families(line) for s in family.samples]
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"line {number} is not of the Prometheus text format: {line!r}.") from error
        for sample in samples:
            yield name, sample.labels, sample.value, _seconds(sample.timestamp)


def _seconds(stamp: object) -> float | None:
    return None if stamp is None else float(str(stamp))


def present_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels under the names of the present dcgm-exporter, whatever its version."""
    return {_OLD_LABELS.get(key, key): text for key, text in labels.items()}


def device_of(labels: Mapping[str, str]) -> Device:
    """Return the device that a series with these `present_labels` is of."""
    told = {key: value for key, value in labels.items() if value}
    return Device(
        host=told.get("hostname"),
        index=told.get("gpu"),
        uuid=told.get("UUID"),
        model=told.get("modelName"),
        mig_profile=told.get("GPU_I_PROFILE"),
        mig_instance=told.get("GPU_I_ID"),
    )


def blank_reason(name: str, value: float) -> str | None:
    """Return why a value of the metric `name` is none, such as "not supported"; None if it is one."""
    for base in reversed(_BLANKS):
        if name in CYCLE_NAMES and base < _LEAST_COUNT_BLANK:
            break
        if value >= base and math.isfinite(value):
            code = int(value) - base
            return _BLANK_MEANINGS[code] if code < len(_BLANK_MEANINGS) else "blank"
    if not math.isfinite(value) or value < 0:
        return f"{value:g} is not a value"
    if name in TENSOR_NAMES and check_activity(value) is None:
        return f"{value:g} is not a share of cycles"
    return None


DMON_TENSOR = "TENSO"
"""Field 1004, any tensor pipe, as a share of cycles (`dcgm_fields.h` of DCGM 4.6.0)."""
DMON_CLOCK = "SMCLK"
"""Field 100, SM clock in MHz."""
DMON_CYCLES = ("SMCELAP", "MMACACT")
"""Fields 1084 and 1086, running counts of cycles elapsed and of tensor cycles (`dcgm_fields.cpp`, 4.6.0)."""
_NOT_INSTEAD = {
    "THMMA": "THMMA counts the half-precision pipe alone",
    "MMACACT": "how MMACACT is counted is not documented, and TENSO shows it",
    "SMACT": "SMACT is the activity of whole SMs",
}
_ENTITY = re.compile(r"\s*(GPU|GPU-I|GPU-CI)\s+(\d+)\s")
_OTHER_ENTITY = re.compile(r"\s*([A-Za-z][\w-]*)\s+\d+\s")
_BLANK = "N/A"


def read_dmon(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    host: str | None = None,
    start_s: float | None = None,
    interval_s: float | None = None,
) -> Readings:
    """Read what `dcgmi dmon` has printed.

    Columns may stand in any order, and headers may repeat or change. A MIG slice ("GPU-I 21") keeps DCGM's
    number for it; the output does not say on which GPU it lies. A last line without its end is left out: half
    a number looks like a number. Cycle counters (SMCELAP, MMACACT) are used as `activity_from_cycles` says.

    Args:
        source: Path of a file, or a text stream or other lines.
        host: Name of the node, which the output does not have.
        start_s: Unix time of the first rows in seconds; the output has no times.
        interval_s: Seconds from one block of rows to the next (`-d` of dcgmi is in milliseconds).

    Returns:
        The samples of GPUs and slices, with notes on columns that are missing or not used.

    Raises:
        ValueError: There is no header, or only one of `start_s` and `interval_s` is given.
    """
    if (start_s is None) != (interval_s is None):
        raise ValueError(
            f"start_s={start_s!r} and interval_s={interval_s!r} must be given together, or not at all."
        )
    lines = _Lines(host)
    for line in _lines(source):
        lines.take(line)
    if not lines.columns:
        raise ValueError("no header begins with #Entity, so this is not the output of dcgmi dmon.")
    times = None if start_s is None or interval_s is None else (start_s, interval_s)
    counted = activity_from_cycles(row.sample(times) for row in lines.rows)
    rare = None if interval_s is None else warn_of_rare_samples(interval_s)
    return Readings(counted.samples, (*_notes(lines), *counted.notes, *([] if rare is None else [rare])))


def _lines(source: str | os.PathLike[str] | Iterable[str]) -> Iterator[str]:
    if isinstance(source, str | os.PathLike):
        with Path(source).open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    else:
        yield from source


@dataclass(frozen=True, slots=True)
class _Row:
    device: Device
    block: int
    activity: float | None
    clock: float | None
    cycles: tuple[float | None, ...]

    def sample(self, times: tuple[float, float] | None) -> Sample:
        time = None if times is None else times[0] + self.block * times[1]
        elapsed, tensor = self.cycles
        return Sample(
            self.device, self.activity, self.clock, time, elapsed_cycles=elapsed, tensor_cycles=tensor
        )


@dataclass
class _Lines:
    host: str | None
    columns: list[tuple[str, int]] = field(default_factory=list)
    seen: dict[str, None] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    devices: dict[tuple[str, str], Device] = field(default_factory=dict)
    last_place: int = -1
    block: int = 0
    blank: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)
    with_ends: bool = False
    torn: bool = False

    def take(self, line: str) -> None:
        if line.lstrip().startswith("#"):
            # Newer versions print "#Entity", older ones "# Entity".
            start = line.index("#") + 1
            names = [(match[0], start + match.start()) for match in re.finditer(r"\S+", line[start:])]
            self.columns = names[1:]
            self.seen.update(dict.fromkeys(name for name, _ in self.columns))
        elif (entity := _ENTITY.match(line)) is None:
            self._pass_over(line)
        elif self.with_ends and not line.endswith("\n"):
            self.torn = True
        else:
            self._add(entity, line)
        self.with_ends = line.endswith("\n")

    def _pass_over(self, line: str) -> None:
        other = _OTHER_ENTITY.match(line)
        if other is not None and self.columns:
            self.others[other[1]] += 1
        elif line.strip() and line.split()[0].upper() != "ID":
            self.unread.append(line.strip())

    def _add(self, entity: re.Match[str], line: str) -> None:
        cells = self._cells(line, line[entity.end() :].split())
        if cells is None:
            self.unread.append(line.strip())
            return
        device = self._device(entity[1], entity[2])
        # Rows come in the same order in each block, and one may be missing.
        place = list(self.devices).index((entity[1], entity[2]))
        self.block += place <= self.last_place
        self.last_place = place
        activity, clock = self._number(cells, DMON_TENSOR), self._number(cells, DMON_CLOCK)
        if activity is not None and check_activity(activity) is None:
            self.wrong[DMON_TENSOR] += 1
            activity = None
        cycles = tuple(self._number(cells, column) for column in DMON_CYCLES)
        self.rows.append(_Row(device, self.block, activity, clock, cycles))

    def _cells(self, line: str, words: list[str]) -> dict[str, str] | None:
        # dcgmi begins values where their header begins (DeviceMonitor.cpp); a name may hold spaces.
        # Text that was copied from elsewhere has the words and not the places.
        starts = [start for _, start in self.columns]
        if all(start < len(line) and line[start - 1] == " " != line[start] for start in starts):
            words = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        elif len(words) != len(starts):
            return None
        return dict(zip((name for name, _ in self.columns), words, strict=True))

    def _device(self, kind: str, number: str) -> Device:
        which = {"index": number} if kind == "GPU" else {"mig_instance": f"{kind} {number}"}
        return self.devices.setdefault((kind, number), Device(host=self.host, **which))

    def _number(self, cells: dict[str, str], column: str) -> float | None:
        text = cells.get(column)
        if text == _BLANK:
            self.blank[column] += 1
        if text is None or text == _BLANK:
            return None
        try:
            if 0 <= (value := float(text)) < math.inf:
                return value
        except ValueError:
            pass
        self.wrong[column] += 1
        return None


def _notes(lines: _Lines) -> Iterator[str]:
    if DMON_TENSOR not in lines.seen:
        instead = "; ".join(text for name, text in _NOT_INSTEAD.items() if name in lines.seen)
        yield f"no column {DMON_TENSOR}: run dcgmi dmon with field 1004" + (
            f" ({instead})" if instead else ""
        )
    if DMON_CLOCK not in lines.seen:
        yield f"no column {DMON_CLOCK}: run dcgmi dmon with field 100; without the SM clock there is no OFU"
    lacking = [name for name in DMON_CYCLES if name not in lines.seen]
    if len(lacking) == 1:
        yield f"no column {lacking[0]}: the cycle counters are used together, fields 1084 and 1086"
    unused = [name for name in lines.seen if name not in (DMON_TENSOR, DMON_CLOCK, *DMON_CYCLES)]
    if unused:
        yield f"columns not used: {', '.join(unused)}"
    for column, count in lines.blank.items():
        yield f"{column}: {count} of {len(lines.rows)} values are {_BLANK}"
    for column, count in lines.wrong.items():
        unit = {DMON_TENSOR: "a share from 0 to 1", DMON_CLOCK: "a number of MHz"}.get(column, "a count")
        yield f"{column}: {count} of {len(lines.rows)} values are not {unit} and were left out"
    if any(device.is_slice for device in lines.devices.values()) and any(
        not device.is_slice for device in lines.devices.values()
    ):
        yield "there are rows of GPUs and of slices; a slice's work is in its GPU's row too: average one kind"
    if lines.others:
        yield f"rows that are not of GPUs: {', '.join(lines.others)}"
    if lines.unread:
        yield f"{len(lines.unread)} lines do not fit the header, the first: {lines.unread[0]!r}"
    if lines.torn:
        yield "the last line has no end and was left out"


NSYS_TENSOR = "Tensor Active [Throughput %]"
NSYS_CLOCK = "GPC Clock Frequency [MHz]"
_HOW = "Profile with `nsys profile --gpu-metrics-devices=all` and `nsys export --type sqlite`"

_LEAST_HZ = 1e7
"""The stored clock is in Hz whatever its name says (1.71e+09 of an H100); less than 10 MHz would be MHz."""

_METRICS = """
SELECT DISTINCT typeId, metricName FROM TARGET_INFO_GPU_METRICS ORDER BY typeId
"""
_ROWS = """
SELECT m.typeId, m.timestamp,
    MAX(CASE WHEN i.metricName = :tensor THEN m.value END),
    MAX(CASE WHEN i.metricName = :clock THEN m.value END)
FROM GPU_METRICS AS m
JOIN (SELECT DISTINCT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS
      WHERE metricName IN (:tensor, :clock)) AS i
    ON i.typeId = m.typeId AND i.metricId = m.metricId
WHERE m.timestamp >= :first AND m.timestamp < :last
GROUP BY m.typeId, m.timestamp
ORDER BY m.timestamp, m.typeId
"""


def read_nsys(
    path: str | os.PathLike[str],
    *,
    host: str | None = None,
    from_s: float | None = None,
    until_s: float | None = None,
) -> Readings:
    """Read tensor activity and clock from the SQLite export of a Nsight Systems report.

    The clock is that of the GPCs, which the SMs are part of. At 10 kHz a GPU gives 600,000 samples a minute,
    of about 200 bytes each here: choose a window in long captures.

    Args:
        path: The `.sqlite` file, which is opened read-only.
        host: Name of the node.
        from_s: Begin of the window, in seconds since the start of the capture.
        until_s: End of the window.

    Returns:
        One sample per GPU and time, with notes on what the capture lacks. A GPU is the low byte of `typeId`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not such an export, or was captured without GPU metrics.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist.")
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
        try:
            return _read(
                file, database, host, _nanoseconds(from_s, -(2**63)), _nanoseconds(until_s, 2**63 - 1)
            )
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{file} cannot be read as an export of Nsight Systems: {error}.") from error


def _read(file: Path, database: sqlite3.Connection, host: str | None, first: int, last: int) -> Readings:
    missing = {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} - _tables(database)
    if missing:
        raise ValueError(f"{file} has no table {' and '.join(sorted(missing))}. {_HOW}.")
    names: defaultdict[int, set[str]] = defaultdict(set)
    for type_id, name in database.execute(_METRICS):
        names[type_id & 0xFF].add(str(name))
    notes = list(_missing_metrics(names))
    start, uuids = _session_start(database), _uuids(database)
    if start is None:
        notes.append("the wall time of the capture is not in the file: times are seconds since its start")
    devices: dict[int, Device] = {}
    wrong: Counter[str] = Counter()
    samples = []
    query = {"tensor": NSYS_TENSOR, "clock": NSYS_CLOCK, "first": first, "last": last}
    for type_id, timestamp, percent, hertz in database.execute(_ROWS, query):
        gpu = type_id & 0xFF
        if gpu not in devices:
            devices[gpu] = Device(host=host, index=str(gpu), uuid=uuids.get(gpu))
        activity = None if percent is None else check_activity(percent / 100)
        clock = _megahertz(hertz)
        wrong[NSYS_TENSOR] += percent is not None and activity is None
        wrong[NSYS_CLOCK] += hertz is not None and clock is None
        samples.append(Sample(devices[gpu], activity, clock, ((start or 0) + timestamp) / 1e9))
    for name, count in wrong.items():
        if count:
            unit = "0 to 100 %" if name == NSYS_TENSOR else "a clock in Hz"
            notes.append(f"{name}: {count} of {len(samples)} values are not {unit} and were left out")
    if not samples:
        notes.append("there are no samples in the window")
    return Readings(tuple(samples), tuple(notes))


def _nanoseconds(seconds: float | None, default: int) -> int:
    return default if seconds is None else round(seconds * 1e9)


def _megahertz(hertz: float | None) -> float | None:
    if hertz is None or not (hertz == 0 or _LEAST_HZ <= hertz < 1e11):
        return None
    return hertz / 1e6


def _missing_metrics(names: Mapping[int, set[str]]) -> Iterator[str]:
    for wanted, word in ((NSYS_TENSOR, "tensor"), (NSYS_CLOCK, "clock")):
        lacking = [gpu for gpu, known in names.items() if wanted not in known]
        if lacking or not names:
            near = sorted({name for gpu in lacking for name in names[gpu] if word in name.lower()})
            where = "" if len(lacking) == len(names) else f"GPU {', '.join(map(str, lacking))}: "
            rest = f"there is {', '.join(near)}, not used" if near else _HOW
            yield f"{where}no metric {wanted!r}; {rest}"


def _tables(database: sqlite3.Connection) -> set[str]:
    return {str(row[0]) for row in database.execute("SELECT name FROM sqlite_master")}


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {str(row[0]) for row in database.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _session_start(database: sqlite3.Connection) -> int | None:
    """Return the Unix time of timestamp 0 in nanoseconds."""
    if "utcEpochNs" not in _columns(database, "TARGET_INFO_SESSION_START_TIME"):
        return None
    row = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _uuids(database: sqlite3.Connection) -> dict[int, str]:
    if not {"id", "uuid"} <= _columns(database, "TARGET_INFO_GPU"):
        return {}
    rows = database.execute("SELECT id, uuid FROM TARGET_INFO_GPU WHERE uuid IS NOT NULL")
    return {int(number): str(uuid) for number, uuid in rows}
