"""What a window of samples comes to: OFU, tensor activity and clock of each device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .clocks import TensorClock, ofu_from_activity
from .gpm import CycleCounts, Reading
from .nvml import Device


@dataclass(frozen=True)
class DeviceWindow:
    """One device over a window.

    Attributes:
        label: NVML's index, of a MIG slice such as "0/1"; where the device was asked for, its UUID.
        name: Name of the device or slice.
        uuid: NVML's UUID of it; empty when unknown.
        ofu: Mean of the samples' tensor activity x SM clock / tensor clock, as a share; None when unknown.
        tensor_activity: Mean tensor pipe activity, as a share; None without samples.
        sm_mhz: Mean SM clock in MHz; None without samples.
        lowest_sm_mhz: Lowest SM clock of a sample, in MHz.
        highest_sm_mhz: Highest SM clock of a sample, in MHz.
        tensor_mhz: Clock in MHz at which the tensor peak is specified; None when unknown.
        samples: Number of samples.
        seconds: Time that the samples cover.
        cycles: What the raw counters grew by; None where the driver has none.
        cycles_seconds: Time in which they did.
        problem: What NVML refused or failed to do, or why the tensor clock is unknown; None if nothing. With
            samples that succeeded, `ofu` is their mean all the same.
    """

    label: str
    name: str
    uuid: str
    ofu: float | None
    tensor_activity: float | None
    sm_mhz: float | None
    lowest_sm_mhz: float | None
    highest_sm_mhz: float | None
    tensor_mhz: float | None
    samples: int
    seconds: float
    cycles: CycleCounts | None
    cycles_seconds: float
    problem: str | None

    @property
    def reason(self) -> str | None:
        """Why `ofu` is None: "unavailable: ...", or that there is no sample yet; None with a figure."""
        if self.ofu is not None:
            return None
        return "no sample yet" if self.problem is None else f"unavailable: {self.problem}"


@dataclass(frozen=True)
class OFUWindow:
    """All devices of a sampler over a window.

    Attributes:
        devices: One entry per device or slice, in NVML's order or as asked for.
        problem: Why there are no devices; None with devices.
    """

    devices: tuple[DeviceWindow, ...]
    problem: str | None = None

    @property
    def ofu(self) -> float | None:
        """Mean over the devices; None if one has no figure."""
        return mean_of_all(device.ofu for device in self.devices)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a figure is missing, by device."""
        if self.problem is not None:
            return (f"unavailable: {self.problem}",)
        return tuple(f"{device.label}: {device.reason}" for device in self.devices if device.reason)

    @property
    def problems(self) -> tuple[str, ...]:
        """As `reasons`, without devices that only have had no time for a sample."""
        if self.problem is not None:
            return self.reasons
        return tuple(
            f"{device.label}: {device.reason}" for device in self.devices if device.reason and device.problem
        )


class WindowSums:
    """Adds up the samples of one device."""

    def __init__(self, device: Device, clock: TensorClock) -> None:
        self._device, self._clock = device, clock
        self.samples = 0
        self._seconds = self._ofu = self._activity = self._mhz = 0.0
        self._lowest, self._highest = math.inf, 0.0
        self._cycles: CycleCounts | None = None
        self._cycles_seconds = 0.0

    def add(self, reading: Reading, before: CycleCounts | None) -> None:
        """Add a sample; `before` are the raw counters at the sample before it, if there are any."""
        self.samples += 1
        self._seconds += reading.seconds
        self._activity += reading.tensor_activity
        self._mhz += reading.sm_mhz
        self._lowest, self._highest = min(self._lowest, reading.sm_mhz), max(self._highest, reading.sm_mhz)
        if self._clock.mhz is not None:
            self._ofu += ofu_from_activity(reading.tensor_activity, reading.sm_mhz, self._clock.mhz)
        if reading.cycles is not None and before is not None:
            self._add_cycles(reading.cycles, before, reading.seconds)

    def window(self, problem: str | None) -> DeviceWindow:
        """Return what the samples come to."""
        count, device, clock = self.samples, self._device, self._clock
        if problem is None and clock.mhz is None:
            problem = clock.source
        return DeviceWindow(
            label=device.label,
            name=device.name,
            uuid=device.uuid,
            ofu=self._ofu / count if count and clock.mhz is not None else None,
            tensor_activity=self._activity / count if count else None,
            sm_mhz=self._mhz / count if count else None,
            lowest_sm_mhz=self._lowest if count else None,
            highest_sm_mhz=self._highest if count else None,
            tensor_mhz=clock.mhz,
            samples=count,
            seconds=self._seconds,
            cycles=self._cycles,
            cycles_seconds=self._cycles_seconds,
            problem=problem,
        )

    def _add_cycles(self, now: CycleCounts, before: CycleCounts, seconds: float) -> None:
        grown = (now.elapsed - before.elapsed, now.active - before.active, now.tensor - before.tensor)
        if min(grown) < 0:
            return  # the driver was loaded anew, and the counters began at 0
        total = self._cycles or CycleCounts(0.0, 0.0, 0.0)
        self._cycles = CycleCounts(total.elapsed + grown[0], total.active + grown[1], total.tensor + grown[2])
        self._cycles_seconds += seconds


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None where there are no values or one of them is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(listed) else None
