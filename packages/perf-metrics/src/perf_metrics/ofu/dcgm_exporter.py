"""The text that dcgm-exporter serves, in the Prometheus text format."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .samples import Device, Job, Readings, Sample, check_activity

TENSOR_NAMES = ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
"""Field 1004, since DCGM 4.6.0 and before; the old name stays as an alias (`dcgmlib/dcgm_fields.h`)."""
CLOCK_NAME = "DCGM_FI_DEV_SM_CLOCK"
"""Field 100, SM clock in MHz."""
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
_BLANK_MEANINGS = ("blank", "not found", "not supported", "not permitted")


def read_exporter(
    text: str, *, time_s: float | None = None, job_labels: Sequence[str] = JOB_LABELS
) -> Readings:
    """Read one answer of dcgm-exporter.

    Where jobs share a device, dcgm-exporter repeats its series once per job. Such a reading becomes one
    sample with several jobs, so that it is averaged once per device and once per job.

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
    return Readings(tuple(scrape.samples()), tuple(scrape.notes()))


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
            yield Sample(device, activity, clock, time, tuple(reading.jobs))

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
            "reading dcgm-exporter needs prometheus-client: pip install 'perf-metrics[prometheus]'"
        ) from error
    wanted = (*TENSOR_NAMES, CLOCK_NAME)
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
            raise ValueError(f"line {number} is not of the Prometheus text format: {line!r}") from error
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
        if value >= base and math.isfinite(value):
            code = int(value) - base
            return _BLANK_MEANINGS[code] if code < len(_BLANK_MEANINGS) else "blank"
    if not math.isfinite(value) or value < 0:
        return f"{value:g} is no value"
    if name in TENSOR_NAMES and check_activity(value) is None:
        return f"{value:g} is not a share of cycles"
    return None
