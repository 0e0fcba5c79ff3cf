"""Live OFU: samples the devices of a node in the background and sums up windows."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from ..uncertainty import LONGEST_STEP_S, MeanInterval, RunningSeries
from .cycles import CycleScale, cycle_scale
from .nvml import CycleCounts, Device, Nvml, Reading, TensorMeter, UnavailableError
from .samples import TensorClock, check_tensor_mhz, ofu_from_activity, ofu_from_cycles, tensor_clock


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
        interval: `ofu` with its confidence interval; None for fewer than 16 samples.
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
    interval: MeanInterval | None = None

    @property
    def reason(self) -> str | None:
        """Why `ofu` is None: "unavailable: ...", or that there is no sample yet; None with a figure."""
        if self.ofu is not None:
            return None
        return "no sample yet" if self.problem is None else f"unavailable: {self.problem}"

    def cycle_scale(self, units: int | None = None) -> CycleScale | None:
        """Return how `cycles` are counted, by the clock and the activity of the window; None without them.

        Args:
            units: Number of SMs; None: that of hardware-table for `name`, which has none of a MIG slice.
        """
        if self.cycles is None:
            return None
        if units is None:
            # Imported here: sampling must not need the table where the tensor clock is given.
            from hardware_table import lookup

            record = lookup(self.name)
            units = None if record is None else record.units
        return cycle_scale(
            self.cycles.elapsed,
            self.cycles.tensor,
            self.cycles_seconds,
            sm_mhz=self.sm_mhz,
            tensor_activity=self.tensor_activity,
            units=units,
        )

    def ofu_of_cycles(self, units: int | None = None) -> float | None:
        """Return OFU by the raw counters, without clock samples; None where `cycle_scale` does not tell."""
        scale = self.cycle_scale(units)
        if scale is None or self.cycles is None or self.tensor_mhz is None:
            return None
        if scale.tensor_activity is None or scale.counts_per_cycle is None:
            return None
        return ofu_from_cycles(
            self.cycles.tensor,
            self.cycles_seconds,
            self.tensor_mhz,
            counts_per_cycle=scale.counts_per_cycle,
        )


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
        self._series = RunningSeries()

    def add(self, reading: Reading, before: CycleCounts | None) -> None:
        """Add a sample; `before` are the raw counters at the sample before it, if there are any."""
        self.samples += 1
        self._seconds += reading.seconds
        self._activity += reading.tensor_activity
        self._mhz += reading.sm_mhz
        self._lowest, self._highest = min(self._lowest, reading.sm_mhz), max(self._highest, reading.sm_mhz)
        if self._clock.mhz is not None:
            ofu = ofu_from_activity(reading.tensor_activity, reading.sm_mhz, self._clock.mhz)
            self._ofu += ofu
            self._series.add(ofu)
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
            interval=self._series.interval(self._seconds / count if count else None),
        )

    def _add_cycles(self, now: CycleCounts, before: CycleCounts, seconds: float) -> None:
        grown = [count - earlier for count, earlier in zip(astuple(now), astuple(before), strict=True)]
        if min(grown) < 0:
            return  # the driver was loaded anew, and the counters began at 0
        total = astuple(self._cycles) if self._cycles else (0.0, 0.0, 0.0)
        self._cycles = CycleCounts(*map(sum, zip(total, grown, strict=True)))
        self._cycles_seconds += seconds


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None where there are no values or one of them is None."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(listed) else None


SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = LONGEST_STEP_S
"""The hardware averages tensor activity over at most this time."""

_STOP_S = 2.0
_logger = logging.getLogger("perf_metrics")


class OFUSampler:
    """Samples tensor activity and SM clock, multiplies them for each sample, and averages over windows.

    A context manager, or call `start` and `stop`. Each device has a daemon thread of its own, so that one
    that is slow or fails does not hold up the others. What NVML cannot tell is said in `DeviceWindow.reason`
    and raises nothing; after an error that will not pass a device is left alone until the next `start`.

    Args:
        devices: UUIDs or PCI bus ids, as `nvidia-smi -L` or `torch.cuda.get_device_properties` give them.
            None: every GPU of the node, and of those in MIG mode every slice.
        interval_s: Seconds between samples, 0.1 to 30: GPM needs more than 100 ms, and the hardware averages
            over 30 s at most ("Instant GPU Efficiency Visibility at Fleet Scale", section on sampling).
        tensor_mhz: Clock in MHz at which the tensor peak is specified, of every device. None: that of
            `tensor_clock`.

    Raises:
        TypeError: `devices` is text.
        ValueError: `interval_s` or `tensor_mhz` is out of range.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        interval_s: float = 1.0,
        tensor_mhz: float | None = None,
    ) -> None:
        if isinstance(devices, str):
            raise TypeError(f"devices={devices!r} must be a list of UUIDs or PCI bus ids.")
        if not SHORTEST_INTERVAL_S <= interval_s <= LONGEST_INTERVAL_S:
            raise ValueError(
                f"interval_s={interval_s!r} must be {SHORTEST_INTERVAL_S} to {LONGEST_INTERVAL_S} seconds, "
                "because samples lie more than 100 ms apart, and the hardware averages over 30 s at most."
            )
        if tensor_mhz is not None:
            check_tensor_mhz(tensor_mhz)
        self.interval_s = interval_s
        self._identifiers = None if devices is None else tuple(devices)
        self._tensor_mhz = tensor_mhz
        self._changed = threading.Condition()
        self._nvml: Nvml | None = None
        self._threads: tuple[_DeviceThread, ...] = ()
        self._problem: str | None = "the sampler was not started"
        self._running = False

    @property
    def problem(self) -> str | None:
        """Why there is nothing to sample at all, such as a missing driver; None with devices."""
        return self._problem

    def start(self) -> None:
        """Begin to sample, and a window; nothing if it runs already.

        Raises:
            ModuleNotFoundError: nvidia-ml-py is not installed.
        """
        if self._running:
            return
        self._threads = ()
        try:
            self._nvml = Nvml()
            self._running = True
            devices = (
                self._nvml.devices()
                if self._identifiers is None
                else [_find_or_say(self._nvml, identifier) for identifier in self._identifiers]
            )
        except UnavailableError as error:
            self._problem, self._running = error.reason, True
            return
        self._problem = None if devices else "NVML lists no devices"
        self._threads = tuple(
            _DeviceThread(self._nvml, device, self._clock(device), self.interval_s, self._changed)
            for device in devices
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End sampling; nothing if it does not run. `window` gives what is left afterwards.

        A thread that waits for the driver is not waited for longer than 2 seconds; NVML stays open then.
        """
        if not self._running:
            return
        self._running = False
        for thread in self._threads:
            thread.ask_to_stop()
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        nvml, self._nvml = self._nvml, None
        if nvml is None or any(thread.is_alive() for thread in self._threads):
            return
        try:
            nvml.close()
        except UnavailableError as error:
            _logger.warning("NVML was not closed: %s", error.reason)

    def window(self) -> OFUWindow:
        """Return what was sampled since the last call (or `start`), and begin the next window."""
        with self._changed:
            return OFUWindow(tuple(thread.end_window() for thread in self._threads), self._problem)

    def pause(self) -> None:
        """Leave out the samples from here to `resume`, such as those of an evaluation."""
        self._count(False)

    def resume(self) -> None:
        """Count samples again: those that begin after this call. Nothing if they are counted."""
        self._count(True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every device has a sample in this window, or will have none.

        Returns:
            Whether that came about within `timeout_s` seconds.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: all(thread.sums.samples or thread.ended for thread in self._threads), timeout_s
            )

    def __enter__(self) -> OFUSampler:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _count(self, counting: bool) -> None:
        with self._changed:
            for thread in self._threads:
                thread.count(counting)

    def _clock(self, device: Device) -> TensorClock:
        if self._tensor_mhz is not None:
            return TensorClock(self._tensor_mhz, "tensor_mhz")
        return tensor_clock(device.chip)


class _DeviceThread(threading.Thread):
    """Samples one device. What others read is read and written under `changed`."""

    def __init__(
        self, nvml: Nvml, device: Device, clock: TensorClock, interval_s: float, changed: threading.Condition
    ) -> None:
        super().__init__(name=f"ofu-{device.label}", daemon=True)
        self._nvml, self._device, self._clock = nvml, device, clock
        self._interval_s, self._changed = interval_s, changed
        self._stop_asked = threading.Event()
        self._asked_at: float | None = None
        self._cycles: CycleCounts | None = None
        self._problem: str | None = None
        self._counting, self._began_uncounted = True, False
        self.sums = WindowSums(device, clock)
        self.ended = False

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    def count(self, counting: bool) -> None:
        """Count samples or not; the caller holds `changed`."""
        # The sample under way at a resumption covers some of the time that is left out.
        self._began_uncounted = counting and (self._began_uncounted or not self._counting)
        self._counting = counting

    def end_window(self) -> DeviceWindow:
        """Return the window and begin the next; the caller holds `changed`."""
        sums, self.sums = self.sums, WindowSums(self._device, self._clock)
        problem = self._problem
        if not self.ended:
            self._problem = None
            late = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
            if problem is None and not sums.samples and late > self._interval_s:
                problem = f"no answer from the driver for {late:.1f} s"
        return sums.window(problem)

    def run(self) -> None:
        problem: str | None = None
        try:
            self._sample()
        except UnavailableError as error:
            problem = error.reason
        except Exception as error:  # a thread has nobody above it to tell
            _logger.exception("sampling of %s ended", self._device.label)
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            self._problem = problem or self._problem
            self.ended, self._asked_at = True, None
            self._changed.notify_all()

    def _sample(self) -> None:
        self._mark_asked()
        meter = TensorMeter(self._nvml, self._device)
        try:
            due = time.monotonic()
            while not self._stop_asked.wait(max(0.0, due - time.monotonic())):
                self._read(meter)
                # After a delay the next sample is due at once; those that were missed are not made up for.
                due = max(due + self._interval_s, time.monotonic() + meter.seconds_to_wait())
        finally:
            meter.close()

    def _read(self, meter: TensorMeter) -> None:
        self._mark_asked()
        reading, problem = None, None
        try:
            reading = meter.read()
        except UnavailableError as error:
            if not error.passing:
                raise
            problem = error.reason
        with self._changed:
            self._asked_at = None
            self._problem = problem or self._problem
            if reading is not None and self._counting and not self._began_uncounted:
                self.sums.add(reading, self._cycles)
            self._began_uncounted = False
            self._cycles = None if reading is None else reading.cycles
            self._changed.notify_all()

    def _mark_asked(self) -> None:
        with self._changed:
            self._asked_at = time.monotonic()


def _find_or_say(nvml: Nvml, identifier: str) -> Device:
    try:
        return nvml.find(identifier)
    except UnavailableError as error:
        return Device(identifier, "unknown", "unknown", "", problem=error.reason)
