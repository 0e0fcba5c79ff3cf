"""Typed access to NVML, the driver's library: opening it, its errors in words, devices and MIG slices."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, TracebackType

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
        with self.errors("nvmlInit"):
            self.bindings.nvmlInit()

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close NVML; other users in this process keep theirs, as NVML counts them."""
        with self.errors("nvmlShutdown"):
            self.bindings.nvmlShutdown()

    def devices(self) -> tuple[Device, ...]:
        """List the GPUs of the node; of a GPU in MIG mode its slices.

        A GPU that NVML does not let this process look at is listed with its `problem`.

        Raises:
            UnavailableError: The number of devices cannot be told.
        """
        with self.errors("nvmlDeviceGetCount"):
            count = int(self.bindings.nvmlDeviceGetCount())
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
        handle = self._first_handle(call, names, identifier)
        if self._is_slice(handle):
            return self._slice(handle, "")
        device = self._whole(handle, "")
        if self._in_mig_mode(handle):
            raise UnavailableError(
                f"{device.uuid} is divided into MIG slices: name the slice, as `nvidia-smi -L` lists it"
            )
        return device

    @contextmanager
    def errors(self, call: str) -> Iterator[None]:
        """Turn NVML's errors into `UnavailableError`, with the name of the call."""
        try:
            yield
        except self.bindings.NVMLError as error:
            raise UnavailableError(
                self._reason(call, error.value), passing=self._code_is(error.value, *_PASSING)
            ) from None

    def _reason(self, call: str, code: int) -> str:
        if self._code_is(code, "NVML_ERROR_LIBRARY_NOT_FOUND"):
            return "libnvidia-ml.so.1 not found: no NVIDIA driver here"
        if self._code_is(code, "NVML_ERROR_FUNCTION_NOT_FOUND"):
            return f"the installed driver has no {call}"
        return f"{call}: {self.bindings.NVMLError(code)}"

    def _code_is(self, code: int, *names: str) -> bool:
        return any(code == getattr(self.bindings, name, None) for name in names)

    def _first_handle(self, call: str, names: list[str], identifier: str) -> object:
        for name in names:
            try:
                with self.errors(call):
                    return getattr(self.bindings, call)(name)
            except UnavailableError as error:
                last = error
        raise UnavailableError(f"no device {identifier!r}: {last.reason}")

    def _at(self, index: int) -> Iterator[Device]:
        label = str(index)
        try:
            with self.errors("nvmlDeviceGetHandleByIndex"):
                handle = self.bindings.nvmlDeviceGetHandleByIndex(index)
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
        with self.errors("nvmlDeviceGetMaxMigDeviceCount"):
            most = int(self.bindings.nvmlDeviceGetMaxMigDeviceCount(handle))
        for index in range(most):
            try:
                with self.errors("nvmlDeviceGetMigDeviceHandleByIndex"):
                    part = self.bindings.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except UnavailableError:
                continue  # not every place need hold a slice; NVML answers "Not Found" for the others
            yield self._slice(part, f"{label}/{index}")

    def _slice(self, part: object, label: str) -> Device:
        with self.errors("nvmlDeviceGetDeviceHandleFromMigDeviceHandle"):
            handle = self.bindings.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        with self.errors("nvmlDeviceGetGpuInstanceId"):
            instance = int(self.bindings.nvmlDeviceGetGpuInstanceId(part))
        own, whole = self._whole(part, label), self._whole(handle, label)
        return Device(label, own.name, whole.name, own.uuid, gpu_instance=instance, handle=handle)

    def _whole(self, handle: object, label: str) -> Device:
        with self.errors("nvmlDeviceGetName"):
            name = str(self.bindings.nvmlDeviceGetName(handle))
        with self.errors("nvmlDeviceGetUUID"):
            uuid = str(self.bindings.nvmlDeviceGetUUID(handle))
        return Device(label or uuid, name, name, uuid, handle=handle)

    def _in_mig_mode(self, handle: object) -> bool:
        try:
            with self.errors("nvmlDeviceGetMigMode"):
                return bool(self.bindings.nvmlDeviceGetMigMode(handle)[0])
        except UnavailableError:
            return False  # devices that cannot be divided answer "Not Supported"

    def _is_slice(self, handle: object) -> bool:
        try:
            with self.errors("nvmlDeviceIsMigDeviceHandle"):
                return bool(self.bindings.nvmlDeviceIsMigDeviceHandle(handle).value)
        except UnavailableError:
            return False  # drivers older than MIG have no such function


def _bindings() -> ModuleType:
    try:
        bindings = importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"NVML needs nvidia-ml-py, which is not installed: {_INSTALL}", name=error.name
        ) from error
    if not hasattr(bindings, "nvmlGpmQueryDeviceSupport"):
        raise ModuleNotFoundError(
            f"the installed module pynvml is too old to know GPM: {_INSTALL}", name="pynvml"
        )
    return bindings
