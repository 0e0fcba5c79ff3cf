"""Samples of tensor activity and SM clock, and OFU from them against the clock of the tensor peak."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from ..uncertainty import FEWEST_SAMPLES, MeanInterval, mean_interval

_PREFERRED_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class TensorClock:
    """The clock at which a device's tensor peak is specified.

    Attributes:
        mhz: The clock in MHz; None when it is not known.
        source: Where the figure is from, or, without a figure, why there is none.
    """

    mhz: float | None
    source: str


def ofu_from_activity(tensor_activity: float, sm_mhz: float, tensor_mhz: float) -> float:
    """Return OFU of one sample: tensor pipe activity x SM clock / tensor clock, as a share.

    The definition of "Instant GPU Efficiency Visibility at Fleet Scale". Multiply for each sample and average
    afterwards: the clock is instantaneous and moves under load. The value is not clamped.

    Args:
        tensor_activity: Share of the cycles in which the tensor pipes worked, 0 to 1.
        sm_mhz: SM clock in MHz at the time of the sample.
        tensor_mhz: Clock in MHz at which the tensor peak is specified; see `tensor_clock`.

    Raises:
        ValueError: An argument is not finite, the activity or the clock is negative, or `tensor_mhz` is not
            positive.
    """
    for setting, value in (("tensor_activity", tensor_activity), ("sm_mhz", sm_mhz)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{setting}={value!r} must be a finite number, 0 or more.")
    check_tensor_mhz(tensor_mhz)
    return tensor_activity * sm_mhz / tensor_mhz


def ofu_from_cycles(
    tensor_cycles: float, seconds: float, tensor_mhz: float, *, counts_per_cycle: float
) -> float:
    """Return OFU from the raw counter of tensor cycles; no clock has to be sampled for it.

    OFU = cycles / (seconds x tensor clock x counts per cycle). What the last factor is, is not documented: 1
    where the driver averages over the SMs, their number where it adds them up. `CycleCounts.elapsed` grows by
    SM clock x `counts_per_cycle` a second: `perf-metrics gemm M N K --measure` finds it on your hardware.

    Args:
        tensor_cycles: What `CycleCounts.tensor` has grown by.
        seconds: Time in which it did.
        tensor_mhz: Clock in MHz at which the tensor peak is specified.
        counts_per_cycle: What the counter of elapsed cycles grows by in one cycle of the SM clock.

    Raises:
        ValueError: `tensor_cycles` is negative or not finite, or another argument is not positive and finite.
    """
    check_tensor_mhz(tensor_mhz)
    if not math.isfinite(tensor_cycles) or tensor_cycles < 0:
        raise ValueError(f"tensor_cycles={tensor_cycles!r} must be a finite number, 0 or more.")
    for setting, value in (("seconds", seconds), ("counts_per_cycle", counts_per_cycle)):
        if not 0 < value < math.inf:
            raise ValueError(f"{setting}={value!r} must be a positive number.")
    return tensor_cycles / (seconds * tensor_mhz * 1e6 * counts_per_cycle)


def tensor_clock(device_name: str) -> TensorClock:
    """Return the clock at which the tensor peak of a device is specified.

    From `hardware_table`: the clock of the peaks where the record has it, else peak / (compute units x FLOPs
    per cycle). It is never the boost limit that the driver tells: that of an H100 SXM is 1980 MHz, and its
    peak of 989 TFLOP/s is 132 x 4096 x 1830 MHz (NVIDIA's H100 whitepaper v1.04, table 3). A MIG slice runs
    at the clock of its device, whose name is the one to give. For GB200 the table has 2008 MHz with the 152
    SMs that the device reports; the publication takes 2062 MHz, which goes with 148.

    Args:
        device_name: Exact device name, as NVML, torch or DCGM's label `modelName` gives it.

    Returns:
        The clock; `mhz` is None for a device without a record, an ambiguous name, and a record without the
        figures.
    """
    # Imported here: the plain formulas must not need the table.
    from hardware_table import lookup

    record = lookup(device_name)
    if record is None:
        return _unknown(f"no single record of {device_name!r} in hardware-table")
    if record.clock_ghz is not None:
        kind = record.clock_kind
        return TensorClock(round(record.clock_ghz * 1000, 1), f"hardware-table, {record.name}: {kind} clock")
    peak = next((peak for dtype in _PREFERRED_DTYPES if (peak := record.peak(dtype)) is not None), None)
    if peak is None or peak.flops_per_cycle is None or record.units is None:
        return _unknown(f"hardware-table has none for {record.name!r}")
    mhz = peak.flops / (record.units * peak.flops_per_cycle) / 1e6
    return TensorClock(mhz, f"hardware-table, {record.name}: peak / ({record.unit_kind}s x FLOPs per cycle)")


def _unknown(why: str) -> TensorClock:
    return TensorClock(None, f"tensor clock unknown: {why}; give tensor_mhz if you know it")


def check_tensor_mhz(value: float) -> None:
    """Raise ValueError unless `value` is a positive finite number of MHz."""
    if not 0 < value < math.inf:
        raise ValueError(f"tensor_mhz={value!r} must be a positive number of MHz, such as 1830.")


_Key = TypeVar("_Key", bound=Hashable)

MAX_ACTIVITY = 1.01
"""A share of cycles is at most 1; what passes it by less than this is taken for rounding and kept as read."""


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU, or the slice of one, that a sample was taken on; None for what the source does not tell.

    Attributes:
        host: Name of the node.
        index: Number of the GPU on its node, as the source counts them.
        uuid: UUID of the GPU, for a slice that of its GPU.
        model: Name of the GPU, such as "NVIDIA H100 80GB HBM3".
        mig_profile: Profile of the MIG slice, such as "1g.10gb".
        mig_instance: The MIG slice by the source's own numbering.
    """

    host: str | None = None
    index: str | None = None
    uuid: str | None = None
    model: str | None = None
    mig_profile: str | None = None
    mig_instance: str | None = None

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice and not a whole GPU."""
        return self.mig_instance is not None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What stays when its host, its exporter or its number is renamed: UUID and slice.

        Without a UUID it is everything else.
        """
        if self.uuid is None:
            return self.host, self.index, self.model, self.mig_profile, self.mig_instance
        return self.uuid, self.mig_profile, self.mig_instance

    def __str__(self) -> str:
        gpu = f"GPU {self.index}" if self.index is not None else self.uuid
        # Without a host, many devices are GPU 0.
        uuid = self.uuid if self.host is None and self.index is not None else None
        mig = " ".join(text for text in (self.mig_instance, self.mig_profile) if text)
        return ", ".join(text for text in (self.host, gpu, uuid, mig) if text) or "unnamed device"


@dataclass(frozen=True, slots=True)
class Job:
    """Who used a device, by the labels of the source, such as hpc_job or pod, namespace and container."""

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Job | None:
        """Return the job with these labels, empty ones left out; None if none is left."""
        told = tuple(sorted((name, value) for name, value in labels.items() if value))
        return cls(told) if told else None

    def label(self, name: str) -> str | None:
        """Return the value of a label, or None."""
        return dict(self.labels).get(name)

    @property
    def name(self) -> str:
        """`hpc_job`, else namespace/pod, else all labels in one."""
        labels = dict(self.labels)
        if "hpc_job" in labels:
            return labels["hpc_job"]
        if "pod" in labels:
            return "/".join(labels[name] for name in ("namespace", "pod") if name in labels)
        return ",".join(f"{name}={value}" for name, value in self.labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one device.

    Attributes:
        device: Where it was taken.
        tensor_activity: Share of cycles with tensor-core instructions, 0 to 1, averaged by the hardware over
            the collection window; None when it could not be read.
        sm_mhz: SM clock in MHz at that moment; None when it could not be read.
        time_s: Seconds, Unix time unless the reader's notes say otherwise; None when the source has no times.
        jobs: Who used the device then. More than one where the device is shared: the reading is the device's.
        elapsed_cycles: Running count of SM cycles elapsed, DCGM's field 1084; None where the source has none.
        tensor_cycles: Running count of tensor cycles, DCGM's field 1086; None likewise. What both say of the
            activity, `activity_from_cycles` tells.
    """

    device: Device
    tensor_activity: float | None
    sm_mhz: float | None
    time_s: float | None = None
    jobs: tuple[Job, ...] = ()
    elapsed_cycles: float | None = None
    tensor_cycles: float | None = None


@dataclass(frozen=True)
class Readings:
    """The samples of a source, and what the source lacked or what of it was not used, in sentences."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeanOFU:
    """OFU over some samples.

    Attributes:
        ofu: As a share, or None when it cannot be told.
        samples: Number of samples in it.
        left_out: Number of samples that are not in it.
        reason: Why `ofu` is None, or why samples were left out; None when there is nothing to say.
        interval: `ofu` with its confidence interval; None where the samples have no times, or too few.
    """

    ofu: float | None
    samples: int
    left_out: int = 0
    reason: str | None = None
    interval: MeanInterval | None = None

    def __str__(self) -> str:
        if self.ofu is None:
            return f"unavailable: {self.reason}"
        if self.interval is None or self.interval.half_width is None:
            return f"{self.ofu:.1%}"
        return self.interval.in_percent()


def mean_ofu(samples: Iterable[Sample], tensor_mhz: float | None) -> MeanOFU:
    """Return the mean of tensor activity x SM clock / tensor clock, multiplied per sample and then averaged.

    The definition of "Instant GPU Efficiency Visibility at Fleet Scale". Activity and clock move together, so
    the product of their averages is another number. Every sample has the same weight.

    Args:
        samples: Of one kind of device. A slice's work is in its whole GPU's samples too: give either.
        tensor_mhz: Clock in MHz at which the tensor-core peak of the device is specified (H100 SXM: 1830, not
            the boost limit of 1980); None when unknown.

    Raises:
        ValueError: `tensor_mhz` is not a positive finite number.
    """
    if tensor_mhz is not None:
        check_tensor_mhz(tensor_mhz)
    complete: list[tuple[float, float]] = []
    times: list[float | None] = []
    no_activity = no_clock = 0
    for sample in samples:
        if sample.tensor_activity is None:
            no_activity += 1
        elif sample.sm_mhz is None:
            no_clock += 1
        else:
            complete.append((sample.tensor_activity, sample.sm_mhz))
            times.append(sample.time_s)
    left_out = no_activity + no_clock
    reason = _reason(len(complete), no_activity, no_clock)
    if not complete:
        return MeanOFU(None, 0, left_out, reason)
    if tensor_mhz is None:
        return MeanOFU(None, 0, left_out + len(complete), "the tensor clock of the device is not known")
    values = [ofu_from_activity(activity, sm_mhz, tensor_mhz) for activity, sm_mhz in complete]
    mean = math.fsum(values) / len(values)
    return MeanOFU(mean, len(values), left_out, reason, _interval(times, values))


def _interval(times: Sequence[float | None], values: Sequence[float]) -> MeanInterval | None:
    """Return the interval of the mean over the devices at each time, each weighted by their number.

    Devices of one job wait for one another: their samples of one time are one sample of the job.
    """
    at: defaultdict[float, list[float]] = defaultdict(list)
    for time_s, value in zip(times, values, strict=True):
        if time_s is None:
            return None
        at[time_s].append(value)
    if len(at) < FEWEST_SAMPLES:
        return None
    rows = [at[time_s] for time_s in sorted(at)]
    step_s = (max(at) - min(at)) / (len(at) - 1)
    weights = [float(len(row)) for row in rows]
    return mean_interval([fmean(row) for row in rows], weights=weights, step_s=step_s)


def mean_ofu_by_device(samples: Iterable[Sample], tensor_mhz: float | None) -> dict[Device, MeanOFU]:
    """Return `mean_ofu` of each device, in the order in which they appear."""
    return _by(((sample.device, sample) for sample in samples), tensor_mhz)


def mean_ofu_by_job(
    samples: Iterable[Sample], tensor_mhz: float | None, label: str | None = None
) -> dict[str, MeanOFU]:
    """Return `mean_ofu` of each job over its devices, in the order in which they appear.

    On a device that jobs share, each of them gets the device's figure: the counters know no processes.

    Args:
        samples: Samples without a job are not in the result.
        tensor_mhz: As for `mean_ofu`.
        label: Label that names the job, such as "pod"; by default `Job.name`.
    """
    return _by(
        (
            (name, sample)
            for sample in samples
            # Two containers of one pod make one job.
            for name in dict.fromkeys(job.name if label is None else job.label(label) for job in sample.jobs)
            if name is not None
        ),
        tensor_mhz,
    )


def _by(keyed: Iterable[tuple[_Key, Sample]], tensor_mhz: float | None) -> dict[_Key, MeanOFU]:
    groups: defaultdict[_Key, list[Sample]] = defaultdict(list)
    for key, sample in keyed:
        groups[key].append(sample)
    return {key: mean_ofu(group, tensor_mhz) for key, group in groups.items()}


def _reason(used: int, no_activity: int, no_clock: int) -> str | None:
    if not used + no_activity + no_clock:
        return "there are no samples"
    lacks = [
        f"{count} of {used + no_activity + no_clock} samples lack the {what}"
        for count, what in ((no_activity, "tensor activity"), (no_clock, "SM clock"))
        if count
    ]
    return "; ".join(lacks) or None


def check_activity(value: float) -> float | None:
    """Return `value`, or None if it is not a share of cycles."""
    return value if 0 <= value <= MAX_ACTIVITY else None
