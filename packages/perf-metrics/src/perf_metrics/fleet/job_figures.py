"""The figures of one job: its OFU, how even its devices are, and which of them is odd."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from ..ofu.samples import Device
from .changes import Drop, find_drops
from .job_samples import DeviceSamples, JobSamples

OddKind: TypeAlias = Literal["slow clock", "less work"]

SLOW_CLOCK = 0.90
"""Share of the median SM clock of the job below which a device is slow: those of healthy GPUs of one job lie
within a few percent (H100 under load: mean 1352 MHz, standard deviation 32; same paper)."""
LESS_WORK = 0.80
"""Share of the median OFU of the job below which a device does less than the others."""
_FEWEST_TO_COMPARE = 3


@dataclass(frozen=True)
class Spread:
    """OFU over the samples of all devices of a job, as shares: mean and percentiles."""

    mean: float
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class DeviceFigures:
    """One device within a job.

    Attributes:
        device: Which one.
        ofu: Mean, as a share.
        tensor_activity: Mean, as a share.
        sm_mhz: Mean SM clock in MHz.
        samples: Number of samples.
        seconds: Time that they stand for.
    """

    device: Device
    ofu: float
    tensor_activity: float
    sm_mhz: float
    samples: int
    seconds: float


@dataclass(frozen=True)
class OddDevice:
    """A device that is unlike the others of its job.

    Attributes:
        kind: "slow clock": a straggler. Where ranks wait for one another all do the same work in the same
            time, so that its OFU is that of the others; its clock is lower and its tensor activity higher.
            "less work": its OFU is lower, with a clock like the others'.
        figures: Of the device.
    """

    kind: OddKind
    figures: DeviceFigures


@dataclass(frozen=True)
class JobFigures:
    """What the counters say of one job.

    Attributes:
        job: Its name.
        start: Unix time of its first sample in seconds.
        end: Unix time of its last sample in seconds.
        cut: Whether it reaches an end of the range that was asked for, so that it may be longer.
        samples: Number of samples in the figures.
        left_out: Number of samples without activity or clock.
        devices: Of each device.
        interval_s: Seconds between the samples of a device; NaN without two of one.
        usual_devices: Number of devices that had the job for half of its time or more.
        ofu: None when there is no sample.
        imbalance: (highest - lowest) / mean of the usual devices' OFU; None for fewer than two, or without
            work.
        odd_devices: Usual ones that are unlike the others of the same model; none where there are fewer than
            three.
        drops: Where OFU fell and stayed low.
        times: Unix times of the series in seconds.
        series: Mean OFU of the devices at these times.
        counts: Number of devices at these times.
    """

    job: str
    start: float
    end: float
    cut: bool
    samples: int
    left_out: int
    devices: tuple[DeviceFigures, ...]
    interval_s: float
    usual_devices: int
    ofu: Spread | None
    imbalance: float | None
    odd_devices: tuple[OddDevice, ...]
    drops: tuple[Drop, ...]
    times: tuple[float, ...]
    series: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def device_hours(self) -> float:
        """Hours that the samples of all devices stand for."""
        return math.fsum(device.seconds for device in self.devices) / 3600


def job_figures(job: str, seen: JobSamples, start: float, end: float, step_s: float) -> JobFigures:
    """Return the figures of one job.

    Args:
        job: Its name.
        seen: Its samples.
        start: Start of the range that was asked for, Unix time in seconds.
        end: End of that range.
        step_s: Seconds between samples.
    """
    interval_s = _interval(seen)
    spacing = interval_s if math.isfinite(interval_s) else step_s
    devices = tuple(_device(device, kept, spacing) for device, kept in seen.devices.items())
    longest = max((device.samples for device in devices), default=0)
    # A node that was swapped out after minutes tells little of the job.
    usual = [device for device in devices if 2 * device.samples >= longest]
    times = tuple(sorted(seen.by_time))
    series = tuple(seen.by_time[time][0] / seen.by_time[time][1] for time in times)
    first, last = (times[0], times[-1]) if times else (math.nan, math.nan)
    return JobFigures(
        job=job,
        start=first,
        end=last,
        cut=bool(times) and (first - start < step_s or end - last < step_s),
        samples=sum(len(kept.ofu) for kept in seen.devices.values()),
        left_out=seen.left_out,
        devices=devices,
        interval_s=interval_s,
        usual_devices=len(usual),
        ofu=spread([value for kept in seen.devices.values() for value in kept.ofu]),
        imbalance=_imbalance([device.ofu for device in usual]),
        odd_devices=tuple(odd_devices(usual)),
        drops=find_drops(times, series),
        times=times,
        series=series,
        counts=tuple(seen.by_time[time][1] for time in times),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and percentiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    low, middle, high = (percentile(ordered, share) for share in (0.1, 0.5, 0.9))
    return Spread(math.fsum(ordered) / len(ordered), low, middle, high)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ascending values, on the line between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def odd_devices(devices: Sequence[DeviceFigures]) -> list[OddDevice]:
    """Return the devices that are unlike the others of their model in their job."""
    models: defaultdict[tuple[str | None, str | None], list[DeviceFigures]] = defaultdict(list)
    for device in devices:
        models[device.device.model, device.device.mig_profile].append(device)
    return [odd for alike in models.values() for odd in _odd_among(alike)]


def _odd_among(devices: Sequence[DeviceFigures]) -> list[OddDevice]:
    if len(devices) < _FEWEST_TO_COMPARE:
        return []
    usual_mhz = median(device.sm_mhz for device in devices)
    usual_ofu = median(device.ofu for device in devices)
    usual_activity = median(device.tensor_activity for device in devices)
    found = []
    for device in devices:
        if device.sm_mhz < SLOW_CLOCK * usual_mhz and device.tensor_activity > usual_activity:
            found.append(OddDevice("slow clock", device))
        elif device.ofu < LESS_WORK * usual_ofu:
            found.append(OddDevice("less work", device))
    return found


def _device(device: Device, kept: DeviceSamples, interval_s: float) -> DeviceFigures:
    count = len(kept.ofu)
    means = math.fsum(kept.ofu) / count, kept.activity_sum / count, kept.mhz_sum / count
    return DeviceFigures(device, *means, samples=count, seconds=count * interval_s)


def _interval(seen: JobSamples) -> float:
    """Return the usual time between samples of a device: longer than a step where scrapes are rarer."""
    found = [
        (kept.last - kept.first) / (len(kept.ofu) - 1) for kept in seen.devices.values() if len(kept.ofu) > 1
    ]
    return median(found) if found else math.nan


def _imbalance(means: Sequence[float]) -> float | None:
    total = math.fsum(means)
    return (max(means) - min(means)) * len(means) / total if len(means) > 1 and total else None
