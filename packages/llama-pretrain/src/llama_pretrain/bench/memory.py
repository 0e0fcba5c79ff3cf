"""The most memory that training takes: of the device, or of this process if it trains on the CPU."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_ALLOCATED = "allocated_bytes.all.peak"


class PeakMemory:
    """Highest memory between its making and `stop`: weights, gradients, optimizer, activations.

    On an accelerator what its allocator has handed out to tensors. On the CPU resident memory above that at
    the beginning, which Linux keeps as a maximum; other systems do not tell.

    Args:
        device: Where it trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes: int | None = None
        """Known after `stop`; None where it cannot be told."""
        self._device = device
        self._before = 0
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        elif _CLEAR_REFS.exists():
            _load_what_a_step_loads()
            _give_back_freed_memory()
            _CLEAR_REFS.write_text("5", encoding="ascii")
            self._before = _resident("VmRSS")

    def stop(self) -> None:
        """Read the maximum."""
        if self._device.type != "cpu":
            self.bytes = torch.accelerator.memory_stats(self._device).get(_ALLOCATED)
        elif _CLEAR_REFS.exists():
            self.bytes = _resident("VmHWM") - self._before


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")


def _load_what_a_step_loads() -> None:
    """torch loads a part of itself in the first step; some libraries have loaded that already."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()


def _give_back_freed_memory() -> None:
    """Otherwise what imports have freed is used again unseen, and a larger library seems to save memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
