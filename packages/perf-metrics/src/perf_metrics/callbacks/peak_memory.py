"""The callback that adds the memory peaks of each log interval, one figure per rank."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..records import is_training
from .events import EventHandlers
from .gathering import gather, world_size

_ALLOCATED = "allocated_bytes.all.peak"
_RESERVED = "reserved_bytes.all.peak"
_RETRIES = "num_alloc_retries"


@dataclass(frozen=True)
class MemoryFigures:
    """What one rank's allocator has counted.

    Attributes:
        allocated: Most bytes in tensors at one time, since the peaks were last reset.
        reserved: Most bytes held by the caching allocator at one time, likewise.
        retries: Times that an allocation failed until cached memory was given back, since the process began.
    """

    allocated: int
    reserved: int
    retries: int


class PeakMemory(EventHandlers):
    """Adds `peak_mem_allocated`, `peak_mem_reserved` and `alloc_retries` to the record of each interval.

    All three are lists with one entry per rank, also where there is one rank. The peaks are in bytes, the
    maximum reached within the log interval; the retries are those within the interval. They are read from
    `torch.accelerator`, on the current device. Without an accelerator, or with one whose allocator keeps no
    figures, nothing is added: not 0, and not an empty list.

    On several ranks the figures are gathered over the default process group, so every rank must have this
    callback and reach each log step. The peaks of the device are reset at each record: let nobody else reset
    them. A trainer that has put `peak_mem_allocated` into the record has done that: its figure stays, and
    only `alloc_retries` is added. Put this callback before `DefaultMetrics`.
    """

    def __init__(self) -> None:
        self._retries_before = 0
        self._seen: object = None
        self._nothing_to_tell = False

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Begin the first interval here."""
        # Once for the whole run: to ask torch at each step takes longer than all else that happens here.
        self._nothing_to_tell = not _has_accelerator() and world_size() == 1
        figures = take_memory_figures()
        self._retries_before = figures.retries if figures is not None else 0

    def on_log_step(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures to the record of an interval; every rank has to call this."""
        self._seen = logs
        if self._nothing_to_tell:
            return
        figures = take_memory_figures()
        ranks = gather_memory_figures(self._within_interval(figures))
        if ranks is None:
            return
        if "peak_mem_allocated" not in logs:
            logs["peak_mem_allocated"] = [rank.allocated for rank in ranks]
            logs["peak_mem_reserved"] = [rank.reserved for rank in ranks]
        logs["alloc_retries"] = [rank.retries for rank in ranks]

    def on_log(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures where the trainer has no `on_log_step`."""
        if is_training(logs) and logs is not self._seen:
            self.on_log_step(args, state, control, logs=logs)

    def _within_interval(self, figures: MemoryFigures | None) -> MemoryFigures | None:
        if figures is None:
            return None
        before, self._retries_before = self._retries_before, figures.retries
        return MemoryFigures(figures.allocated, figures.reserved, figures.retries - before)


def take_memory_figures() -> MemoryFigures | None:
    """Read the figures of this process's current accelerator, and reset its peaks.

    Returns:
        The figures; None without an accelerator, or where its allocator keeps none.
    """
    import torch

    if not _has_accelerator():
        return None
    # Empty until something has been allocated, and for allocators that count nothing.
    stats = torch.accelerator.memory_stats()
    if _ALLOCATED not in stats:
        return None
    torch.accelerator.reset_peak_memory_stats()
    return MemoryFigures(stats[_ALLOCATED], stats[_RESERVED], stats.get(_RETRIES, 0))


def gather_memory_figures(local: MemoryFigures | None) -> Sequence[MemoryFigures] | None:
    """Return the figures of all ranks in the order of ranks; a collective call if there is a process group.

    Args:
        local: Figures of this rank.

    Returns:
        One entry per rank, or None if any rank has no figures: a shorter list would not tell whose they are.
    """
    ranks = gather(None if local is None else astuple(local), _figures)
    known = [rank for rank in ranks if rank is not None]
    return known if len(known) == len(ranks) else None


def _figures(told: Any) -> MemoryFigures | None:
    if told is None:
        return None
    allocated, reserved, retries = told
    return MemoryFigures(int(allocated), int(reserved), int(retries))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
