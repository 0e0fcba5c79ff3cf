"""When Python's garbage is collected, and when cached device memory is given back."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

_GROWTH = 0.05
"""Share of the device's memory by which reserved memory must grow again before the cache is emptied again."""


class GarbagePolicy(AbstractContextManager["GarbagePolicy"]):
    """Collects garbage at chosen steps during a run, and puts everything back at its end.

    Enter it when model, optimizer and loaders exist, so that `gc_freeze` covers them.

    Automatic collection strikes at any time and, among many ranks, at another time on each, so that all wait
    for the slowest one after the other. Collecting by hand makes them pause together.

    Cached device memory is given back when the reserved share of the device exceeds a threshold. A run that
    needs that much at every step would free and reserve it again each time, so after that the cache is left
    alone until reserved memory grows past where it was.

    Args:
        args: gc_steps, gc_freeze and gc_threshold.
        device: Where the model computes; on the CPU there is no cache to give back.
    """

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        self._steps = args.gc_steps
        self._freeze = args.gc_freeze
        self._cache = DeviceCache(device, args.gc_threshold) if device.type == "cuda" else None
        self._was_enabled = True
        self._frozen = False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._steps is not None:
            gc.disable()
        # Objects that somebody else has frozen must stay so: gc can only unfreeze all of them.
        if self._freeze and gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._frozen = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        if self._steps is not None and self._was_enabled:
            gc.enable()

    def after_step(self, global_step: int) -> None:
        """Collect and give back memory if it is time; waits for the device only when it gives memory back.

        Args:
            global_step: Number of optimizer steps done.
        """
        if self._steps is not None and global_step % self._steps == 0:
            gc.collect()
        self.relieve_device()

    def relieve_device(self) -> None:
        """Give cached device memory back if the threshold is exceeded; call it before an evaluation too."""
        if self._cache is not None:
            self._cache.relieve()


class DeviceCache:
    """The memory that torch keeps of a CUDA device, and the point from which on it gives back what it can.

    Args:
        device: The device.
        threshold: Share of its memory.
    """

    def __init__(self, device: torch.device, threshold: float) -> None:
        self._device = device
        self._total = torch.cuda.get_device_properties(device).total_memory
        self.limit = next_limit(self._total, threshold, reserved=0)
        self._threshold = threshold

    def relieve(self) -> None:
        """Empty the cache if more is reserved than the limit."""
        reserved = _reserved(self._device)
        if reserved > self.limit:
            torch.cuda.empty_cache()
            self.limit = next_limit(self._total, self._threshold, reserved=reserved)


def next_limit(total: int, threshold: float, *, reserved: int) -> float:
    """Bytes above which the cache is emptied, given how much was reserved when it was emptied last."""
    if reserved == 0:
        return threshold * total
    return max(threshold * total, reserved + _GROWTH * total)


def _reserved(device: torch.device) -> int:
    # The flat memory_stats() sorts some hundred entries; this is the same figure from the nested one.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["reserved_bytes"]["all"]["current"])
