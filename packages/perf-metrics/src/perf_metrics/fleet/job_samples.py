"""What is kept of a fleet's samples: OFU of each sample of each device of each job."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ofu.clocks import check_tensor_mhz, ofu_from_activity, tensor_clock
from ..ofu.samples import Device


@dataclass
class DeviceSamples:
    """The samples of one device in one job.

    Attributes:
        ofu: Of each sample, as a share.
        first: Unix time of the first sample in seconds.
        last: Unix time of the last one.
        activity_sum: Of tensor activity over the same samples.
        mhz_sum: Of the SM clock in MHz over the same samples.
    """

    first: float
    last: float
    ofu: array[float] = field(default_factory=lambda: array("d"))
    activity_sum: float = 0.0
    mhz_sum: float = 0.0


@dataclass
class JobSamples:
    """The samples of one job.

    Attributes:
        devices: By device, in the order in which they came.
        by_time: Sum of OFU over the devices and their number, by Unix time in seconds.
        left_out: Samples without tensor activity, SM clock or a tensor clock to hold it against.
    """

    devices: dict[Device, DeviceSamples] = field(default_factory=dict)
    by_time: dict[float, tuple[float, int]] = field(default_factory=dict)
    left_out: int = 0


@dataclass
class FleetSamples:
    """The samples of all jobs between two times.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between samples.
        tensor_mhz: Clock of the tensor peak in MHz, for all devices or by name; otherwise that of
            hardware-table.
        jobs: By name.
        unknown_models: Number of samples of devices whose tensor clock is not known, by the device's name.
        notes: What was missing, in sentences.
    """

    start: float
    end: float
    step_s: float
    tensor_mhz: float | Mapping[str, float] | None = None
    jobs: defaultdict[str, JobSamples] = field(default_factory=lambda: defaultdict(JobSamples))
    unknown_models: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    _clocks: dict[str | None, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.tensor_mhz
        for clock in given.values() if isinstance(given, Mapping) else () if given is None else (given,):
            check_tensor_mhz(clock)
        if isinstance(given, Mapping):
            self._clocks.update(given)

    def add(
        self, job_name: str, device: Device, time_s: float, activity: float | None, mhz: float | None
    ) -> None:
        """Take one sample of a job's device; one that OFU cannot be told of is only counted."""
        job = self.jobs[job_name]
        tensor_mhz = self._tensor_mhz_of(device.model)
        if activity is None or mhz is None or tensor_mhz is None:
            job.left_out += 1
            if tensor_mhz is None:
                self.unknown_models[device.model or "a device without a name"] += 1
            return
        ofu = ofu_from_activity(activity, mhz, tensor_mhz)
        kept = job.devices.get(device)
        if kept is None:
            kept = job.devices[device] = DeviceSamples(time_s, time_s)
        kept.first, kept.last = min(kept.first, time_s), max(kept.last, time_s)
        kept.ofu.append(ofu)
        kept.activity_sum += activity
        kept.mhz_sum += mhz
        total, count = job.by_time.get(time_s, (0.0, 0))
        job.by_time[time_s] = (total + ofu, count + 1)

    def _tensor_mhz_of(self, model: str | None) -> float | None:
        if isinstance(self.tensor_mhz, float | int):
            return self.tensor_mhz
        if model not in self._clocks:
            self._clocks[model] = None if model is None else tensor_clock(model).mhz
        return self._clocks[model]
