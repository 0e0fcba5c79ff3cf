"""Tensor activity of one device through GPM, NVML's performance monitoring, with the clock of the same time.

GPM needs Hopper or newer. It measures a device or a MIG GPU instance, not a process. The sequence of calls is
that of nvml.h 12.9: two samples more than 100 ms apart, compared, and the older one taken anew.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from .nvml import Device, Nvml, UnavailableError

SHORTEST_GAP_S = 0.105
"""Seconds between two samples of a device: nvml.h asks for more than 100 ms."""


@dataclass(frozen=True)
class CycleCounts:
    """Raw counters since the driver was loaded, as GPM's metrics 248, 249 and 250 give them.

    Attributes:
        elapsed: SM cycles elapsed.
        active: Cycles in which SMs had work.
        tensor: Cycles in which tensor pipes worked.
    """

    elapsed: float
    active: float
    tensor: float


@dataclass(frozen=True)
class Reading:
    """One sample of a device.

    Attributes:
        tensor_activity: Share of the cycles in which the tensor pipes worked since the sample before, 0 to 1.
        sm_mhz: SM clock in MHz at the end of that time.
        seconds: Time since the sample before.
        cycles: Raw counters at the end of that time; None where the driver or its bindings have none.
    """

    tensor_activity: float
    sm_mhz: float
    seconds: float
    cycles: CycleCounts | None


class TensorMeter:
    """Reads tensor activity, SM clock and raw counters of one device; not for several threads at a time.

    Args:
        nvml: NVML, open as long as the meter is.
        device: What to measure.

    Raises:
        UnavailableError: The device or the driver has no GPM, or does not permit it.
    """

    def __init__(self, nvml: Nvml, device: Device) -> None:
        if device.problem is not None:
            raise UnavailableError(device.problem)
        pynvml = nvml.bindings
        self._nvml, self._pynvml, self._device = nvml, pynvml, device
        with nvml.errors("nvmlGpmQueryDeviceSupport"):
            support = pynvml.nvmlGpmQueryDeviceSupport(device.handle)
        if not support.isSupportedDevice:
            raise UnavailableError("no tensor activity: the device has no GPM, which needs Hopper or newer")
        names = ("SM_CYCLES_ELAPSED", "SM_CYCLES_ACTIVE", "MMA_CYCLES_ACTIVE")
        ids = [getattr(pynvml, f"NVML_GPM_METRIC_{name}", None) for name in names]
        self._counters = [number for number in ids if number is not None]
        self.counters_reason: str | None = None
        """Why `Reading.cycles` is None, once that is known."""
        if len(self._counters) < len(names):
            self._no_counters("the installed nvidia-ml-py has no cycle counters; they came with 13.595")
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._samples: list[object] = []
        self._taken_at: float | None = None
        try:
            for _ in range(2):
                with nvml.errors("nvmlGpmSampleAlloc"):
                    self._samples.append(pynvml.nvmlGpmSampleAlloc())
        except UnavailableError:
            self.close()
            raise

    def seconds_to_wait(self) -> float:
        """Seconds until the next reading may be taken."""
        if self._taken_at is None:
            return 0.0
        return max(0.0, self._taken_at + SHORTEST_GAP_S - time.monotonic())

    def read(self) -> Reading | None:
        """Take a sample and compare it with the one before.

        Returns:
            The reading; None for the first sample, and for the first after one that failed.

        Raises:
            UnavailableError: NVML cannot tell, or the sample before is less than 100 ms old.
        """
        if self.seconds_to_wait() > 0:
            raise UnavailableError("GPM samples must be more than 100 ms apart", passing=True)
        before, self._taken_at = self._taken_at, None
        earlier, later = self._samples
        self._take(later)
        now = time.monotonic()
        sm_mhz = self._sm_mhz()
        self._samples = [later, earlier]
        self._taken_at = now
        if before is None:
            return None
        percent = self._metrics(earlier, later, [self._pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL])[0]
        return Reading(percent / 100, sm_mhz, now - before, self._cycles(earlier, later))

    def close(self) -> None:
        """Free the two samples; may be called again."""
        while self._samples:
            with self._nvml.errors("nvmlGpmSampleFree"):
                self._pynvml.nvmlGpmSampleFree(self._samples.pop())

    def _take(self, sample: object) -> None:
        handle, instance = self._device.handle, self._device.gpu_instance
        if instance is None:
            with self._nvml.errors("nvmlGpmSampleGet"):
                self._pynvml.nvmlGpmSampleGet(handle, sample)
        else:
            with self._nvml.errors("nvmlGpmMigSampleGet"):
                self._pynvml.nvmlGpmMigSampleGet(handle, instance, sample)

    def _sm_mhz(self) -> float:
        with self._nvml.errors("nvmlDeviceGetClockInfo"):
            return float(self._pynvml.nvmlDeviceGetClockInfo(self._device.handle, self._pynvml.NVML_CLOCK_SM))

    def _cycles(self, earlier: object, later: object) -> CycleCounts | None:
        if not self._counters:
            return None
        # In a call of their own: a driver that does not know them may refuse the call as a whole.
        try:
            return CycleCounts(*self._metrics(earlier, later, self._counters))
        except UnavailableError as error:
            self._no_counters(error.reason)
            return None

    def _no_counters(self, reason: str) -> None:
        self._counters, self.counters_reason = [], reason

    def _metrics(self, earlier: object, later: object, ids: list[int]) -> list[float]:
        request = self._request
        request.version = self._pynvml.NVML_GPM_METRICS_GET_VERSION
        request.sample1, request.sample2, request.numMetrics = earlier, later, len(ids)
        for index, number in enumerate(ids):
            request.metrics[index].metricId = number
        with self._nvml.errors("nvmlGpmMetricsGet"):
            self._pynvml.nvmlGpmMetricsGet(request)
        return [
            self._value(request.metrics[index].nvmlReturn, request.metrics[index].value, number)
            for index, number in enumerate(ids)
        ]

    def _value(self, status: int, value: float, number: int) -> float:
        what = f"GPM metric {number}"
        with self._nvml.errors(what):
            if status != self._pynvml.NVML_SUCCESS:
                raise self._pynvml.NVMLError(status)
        if not math.isfinite(value) or value < 0:
            raise UnavailableError(f"{what}: the driver gave {value}", passing=True)
        return float(value)
