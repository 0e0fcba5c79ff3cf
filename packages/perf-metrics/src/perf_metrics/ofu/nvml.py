"""Typed access to NVML: devices and MIG slices, clocks, and tensor activity through GPM."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_INSTALL = "pip install 'perf-metrics[nvml]'"
# After an error of one of these kinds the next call may do; after another it would fail again.
_PASSING = (
    "NVML_ERROR_TIMEOUT",
    "NVML_ERROR_IN_USE",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_NOT_READY",
    "NVML_ERROR_INSUFFICIENT_RESOURCES",
    "NVML_ERROR_MEMORY",
    "NVML_ERROR_UNKNOWN",
)


class UnavailableError(Exception):
    """NVML cannot tell something.

    Attributes:
        reason: The call and what it answered, in words.
        passing: Whether to try again makes sense.
    """

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.passing = passing


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG slice of one.

    Attributes:
        label: NVML's index; of a slice "GPU/slice", such as "0/1".
        name: The name of the device or slice.
        chip: The name of the whole device, which the tensor clock goes by.
        uuid: "GPU-..." or "MIG-..."; empty when NVML does not tell.
        gpu_instance: Id of the slice's GPU instance; None for a whole device.
        problem: Why it cannot be measured, where that is known already.
        handle: NVML's handle of the whole device.
    """

    label: str
    name: str
    chip: str
    uuid: str
    gpu_instance: int | None = None
    problem: str | None = None
    handle: object = field(default=None, repr=False, compare=False)


class Nvml:
    """NVML, opened; a context manager, or call `close`.

    Attributes:
        bindings: The module `pynvml` of nvidia-ml-py.

    Raises:
        ModuleNotFoundError: nvidia-ml-py is not installed, or another, older `pynvml` is in its place.
        UnavailableError: There is no driver, or it refuses.
    """

    def __init__(self) -> None:
        self.bindings = _bindings()
        self.call("nvmlInit")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close NVML; other users in this process keep theirs, as NVML counts them."""
        self.call("nvmlShutdown")

    def devices(self) -> tuple[Device, ...]:
        """List the GPUs of the node; of a GPU in MIG mode its slices.

        A GPU that NVML does not let this process look at is listed with its `problem`.

        Raises:
            UnavailableError: The number of devices cannot be told.
        """
        count = int(self.call("nvmlDeviceGetCount"))
        return tuple(device for index in range(count) for device in self._at(index))

    def find(self, identifier: str) -> Device:
        """Find a device or slice.

        Args:
            identifier: UUID as NVML gives it ("GPU-...", "MIG-..."), or without that prefix as CUDA and torch
                give it, or a PCI bus id such as "0000:3b:00.0".

        Raises:
            UnavailableError: There is no such device, or it is a whole GPU in MIG mode.
        """
        if identifier.startswith(("GPU-", "MIG-")):
            call, names = "nvmlDeviceGetHandleByUUID", [identifier]
        elif ":" in identifier:
            call, names = "nvmlDeviceGetHandleByPciBusId", [identifier]
        else:
            call, names = "nvmlDeviceGetHandleByUUID", [f"GPU-{identifier}", f"MIG-{identifier}"]
        for name in names:
            try:
                handle = self.call(call, name)
                break
            except UnavailableError as error:
                reason = error.reason
        else:
            raise UnavailableError(f"no device {identifier!r}: {reason}")
        if self._is_slice(handle):
            return self._slice(handle, "")
        device = self._whole(handle, "")
        if self._in_mig_mode(handle):
            raise UnavailableError(
                f"{device.uuid} is divided into MIG slices: name the slice, as `nvidia-smi -L` lists it"
            )
        return device

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of NVML; its errors become `UnavailableError`, with the name of the call."""
        try:
            return getattr(self.bindings, name)(*arguments)
        except self.bindings.NVMLError as error:
            raise self.error(name, error.value) from None

    def error(self, what: str, code: int) -> UnavailableError:
        """Return the error for a code that NVML has answered with."""
        reason = f"{what}: {self.bindings.NVMLError(code)}"
        if self._code_is(code, "NVML_ERROR_LIBRARY_NOT_FOUND"):
            reason = "libnvidia-ml.so.1 not found: no NVIDIA driver here"
        elif self._code_is(code, "NVML_ERROR_FUNCTION_NOT_FOUND"):
            reason = f"the installed driver has no {what}"
        return UnavailableError(reason, passing=self._code_is(code, *_PASSING))

    def _code_is(self, code: int, *names: str) -> bool:
        return any(code == getattr(self.bindings, name, None) for name in names)

    def _at(self, index: int) -> Iterator[Device]:
        label = str(index)
        try:
            handle = self.call("nvmlDeviceGetHandleByIndex", index)
            whole = self._whole(handle, label)
            slices = tuple(self._slices(handle, label)) if self._in_mig_mode(handle) else None
        except UnavailableError as error:
            yield Device(label, "unknown", "unknown", "", problem=error.reason)
            return
        if slices is None:
            yield whole
        elif slices:
            yield from slices
        else:
            problem = "in MIG mode, without slices"
            yield Device(label, whole.name, whole.chip, whole.uuid, problem=problem)

    def _slices(self, handle: object, label: str) -> Iterator[Device]:
        most = int(self.call("nvmlDeviceGetMaxMigDeviceCount", handle))
        for index in range(most):
            try:
                part = self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            except UnavailableError:
                continue  # not every place need hold a slice; NVML answers "Not Found" for the others
            yield self._slice(part, f"{label}/{index}")

    def _slice(self, part: object, label: str) -> Device:
        handle = self.call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
        instance = int(self.call("nvmlDeviceGetGpuInstanceId", part))
        own, whole = self._whole(part, label), self._whole(handle, label)
        return Device(label, own.name, whole.name, own.uuid, gpu_instance=instance, handle=handle)

    def _whole(self, handle: object, label: str) -> Device:
        name = str(self.call("nvmlDeviceGetName", handle))
        uuid = str(self.call("nvmlDeviceGetUUID", handle))
        return Device(label or uuid, name, name, uuid, handle=handle)

    def _in_mig_mode(self, handle: object) -> bool:
        try:
            return bool(self.call("nvmlDeviceGetMigMode", handle)[0])
        except UnavailableError:
            return False  # devices that cannot be divided answer "Not Supported"

    def _is_slice(self, handle: object) -> bool:
        try:
            return bool(self.call("nvmlDeviceIsMigDeviceHandle", handle).value)
        except UnavailableError:
            return False  # drivers older than MIG have no such function


def _bindings() -> ModuleType:
    try:
        bindings = importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"NVML needs nvidia-ml-py, which is not installed. Install it with `{_INSTALL}`.", name=error.name
        ) from error
    if not hasattr(bindings, "nvmlGpmQueryDeviceSupport"):
        raise ModuleNotFoundError(
            f"the installed module pynvml is too old to know GPM. Install a newer one with `{_INSTALL}`.",
            name="pynvml",
        )
    return bindings


def current_cuda_device() -> str:
    """Return what NVML knows torch's current CUDA device by: UUIDs, as the two count devices differently.

    Raises:
        UnavailableError: torch is not loaded, or this process has no CUDA device.
    """
    if "torch" not in sys.modules:
        raise UnavailableError("torch is not loaded, so give `devices` of OFUMetrics")
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise UnavailableError("this process has no CUDA device")
    index = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return identifier_of(index, uuid, os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def identifier_of(index: int, uuid: str, visible: str) -> str:
    """Return what NVML knows a CUDA device by.

    Args:
        index: CUDA's index of the device.
        uuid: The UUID that CUDA gives it. Of a MIG slice that may be the one of the whole device.
        visible: `CUDA_VISIBLE_DEVICES`, in which a slice can only be chosen by its name.
    """
    names = [name.strip() for name in visible.split(",")]
    return names[index] if index < len(names) and names[index].startswith("MIG-") else uuid


# GPM, NVML's performance monitoring, needs Hopper or newer. It measures a device or a MIG GPU instance, not a
# process. The sequence of calls is that of nvml.h 12.9: two samples more than 100 ms apart, compared, and the
# older one taken anew.

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
        support = nvml.call("nvmlGpmQueryDeviceSupport", device.handle)
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
                self._samples.append(nvml.call("nvmlGpmSampleAlloc"))
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
        clock = self._nvml.call("nvmlDeviceGetClockInfo", self._device.handle, self._pynvml.NVML_CLOCK_SM)
        self._samples = [later, earlier]
        self._taken_at = now
        if before is None:
            return None
        percent = self._metrics(earlier, later, [self._pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL])[0]
        return Reading(percent / 100, float(clock), now - before, self._cycles(earlier, later))

    def close(self) -> None:
        """Free the two samples; may be called again."""
        while self._samples:
            self._nvml.call("nvmlGpmSampleFree", self._samples.pop())

    def _take(self, sample: object) -> None:
        handle, instance = self._device.handle, self._device.gpu_instance
        if instance is None:
            self._nvml.call("nvmlGpmSampleGet", handle, sample)
        else:
            self._nvml.call("nvmlGpmMigSampleGet", handle, instance, sample)

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
        self._nvml.call("nvmlGpmMetricsGet", request)
        values = []
        for number, metric in zip(ids, request.metrics, strict=False):
            what, value = f"GPM metric {number}", float(metric.value)
            if metric.nvmlReturn != self._pynvml.NVML_SUCCESS:
                raise self._nvml.error(what, metric.nvmlReturn)
            if not math.isfinite(value) or value < 0:
                raise UnavailableError(f"{what}: the driver gave {value}", passing=True)
            values.append(value)
        return values
