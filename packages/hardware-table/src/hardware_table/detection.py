"""Asking torch, if it is there, which accelerator this process uses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from hardware_table.matching import lookup
from hardware_table.records import Accelerator

_said: set[str] = set()


class HardwareTableWarning(UserWarning):
    """A peak is unknown or uncertain, or what was detected could not be written down."""


def warn_once(message: str) -> None:
    """Warn with `HardwareTableWarning`, unless this process has said the same before."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, HardwareTableWarning, stacklevel=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedDevice:
    """An accelerator of the running machine, as torch describes it.

    Attributes:
        name: Device name, exactly as torch gives it.
        backend: "cuda", "rocm" or "xpu".
        index: Index of the device among those visible to this process.
        units: Number of compute units that the device reports (SMs, CUs or EUs).
        total_memory: Memory in bytes.
        compute_capability: Such as "9.0"; None on XPU.
    """

    name: str
    backend: str
    index: int
    units: int
    total_memory: int
    compute_capability: str | None = None

    @property
    def accelerator(self) -> Accelerator | None:
        """The table's record for this name and number of units, or None."""
        return lookup(self.name, units=self.units)


def detect(index: int | None = None) -> DetectedDevice | None:
    """Tell which accelerator this process uses.

    Imports torch, and initialises the device's runtime in this process: where processes are forked later,
    call it after the fork.

    Args:
        index: Index among the visible devices. None means the current device.

    Returns:
        The device, or None if there is no CUDA, ROCm or XPU device. If torch is not installed, None and one
        `HardwareTableWarning` that says so.

    Raises:
        TypeError: If `index` is not an integer.
        ValueError: If there is no device with this index.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        warn_once(
            "torch is not installed, so this machine's accelerator cannot be detected; install torch, or "
            "pass the peak in FLOP/s, or look it up by name with hardware_table.peak_flops(name)"
        )
        return None
    if torch.cuda.is_available():
        index = _valid(index, torch.cuda.device_count(), torch.cuda.current_device)
        cuda = torch.cuda.get_device_properties(index)
        return DetectedDevice(
            name=cuda.name,
            backend="rocm" if torch.version.hip else "cuda",
            index=index,
            units=cuda.multi_processor_count,
            total_memory=cuda.total_memory,
            compute_capability=f"{cuda.major}.{cuda.minor}",
        )
    if torch.xpu.is_available():
        index = _valid(index, torch.xpu.device_count(), torch.xpu.current_device)
        xpu = torch.xpu.get_device_properties(index)
        return DetectedDevice(
            name=xpu.name,
            backend="xpu",
            index=index,
            units=xpu.gpu_eu_count,
            total_memory=xpu.total_memory,
        )
    return None


def _valid(index: int | None, count: int, current: Callable[[], int]) -> int:
    if index is None:
        return current()
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"device index {index!r} must be an integer from 0 to {count - 1}.")
    if not 0 <= index < count:
        raise ValueError(
            f"device index {index} does not exist, because {count} are visible. Use 0 to {count - 1}."
        )
    return index
