"""On what a turn trains: the device, its name, and the most that it can do."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from perf_metrics import device_peak_flops

_CPU_INFO = Path("/proc/cpuinfo")


def choose_device(use_cpu: bool) -> torch.device:
    """The first accelerator, or the CPU if there is none or it is asked for."""
    found = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def device_name(device: torch.device) -> str:
    """What its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """Dense FLOP/s in the dtype of the matrix products; None if unknown.

    On the CPU of a machine with an accelerator too: the table would tell that one's.
    """
    if device.type == "cpu" and torch.accelerator.is_available():
        return None
    return device_peak_flops("bf16" if mixed_precision == "bf16" else "fp32")
