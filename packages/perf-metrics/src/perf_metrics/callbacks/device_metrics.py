"""Callbacks that add peak memory and OFU of the devices of all ranks to each log record."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias, TypeVar

from ..logs.log_file import is_training
from ..ofu.nvml import UnavailableError, current_cuda_device
from ..ofu.sampler import OFUSampler, mean_of_all
from ..utilization import gather_over_ranks, gathering_device, has_process_group
from . import EventHandlers

# Figures of all ranks travel as JSON in tensors: what other ranks send is read, never unpickled.

T = TypeVar("T")

_MOST_BYTES = 1 << 20
"""Of the figures of one rank; far more than any callback has to tell."""


def gather(value: object, read: Callable[[object], T]) -> list[T]:
    """Return what all ranks tell, in their order; a collective call if there is a process group.

    Args:
        value: What this rank tells: anything that JSON holds.
        read: Makes something of what a rank tells; may raise ValueError or TypeError.

    Raises:
        RuntimeError: A rank told something that cannot be read.
    """
    if not has_process_group():
        return [read(value)]
    import torch

    message = json.dumps(value).encode()
    sizes = [size for (size,) in gather_over_ranks([len(message)])]
    for rank, size in enumerate(sizes):
        if not 0 < size <= _MOST_BYTES:
            raise RuntimeError(
                f"rank {rank} tells its figures in {size:g} bytes. Do all ranks run one release?"
            )
    padded = bytearray(message.ljust(int(max(sizes))))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(gathering_device())
    parts = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(parts, own)
    told = []
    for rank, part in enumerate(parts):
        try:
            told.append(read(json.loads(bytes(part.tolist()))))
        except (ValueError, TypeError, RecursionError) as error:
            raise RuntimeError(
                f"rank {rank} tells figures that cannot be read ({error}). Do all ranks run one release?"
            ) from error
    return told


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


class _IntervalFigures(EventHandlers, ABC):
    """Adds figures to the record of each interval once, in whichever event the trainer has."""

    _seen: object = None

    def on_log_step(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures to the record of an interval; every rank has to call this."""
        self._seen = logs
        self._add(logs, state)

    def on_log(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures where the trainer has no `on_log_step`."""
        if is_training(logs) and logs is not self._seen:
            self.on_log_step(args, state, control, logs=logs)

    @abstractmethod
    def _add(self, logs: MutableMapping[str, object], state: object) -> None:
        """Add the figures to a record."""


class PeakMemory(_IntervalFigures):
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
        self._nothing_to_tell = False

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Begin the first interval here."""
        # Once for the whole run: to ask torch at each step takes longer than all else that happens here.
        self._nothing_to_tell = not _has_accelerator() and not has_process_group()
        figures = take_memory_figures()
        self._retries_before = figures.retries if figures is not None else 0

    def _add(self, logs: MutableMapping[str, object], state: object) -> None:
        if self._nothing_to_tell:
            return
        figures = take_memory_figures()
        if figures is not None:
            before, self._retries_before = self._retries_before, figures.retries
            figures = replace(figures, retries=figures.retries - before)
        ranks = gather_memory_figures(figures)
        if ranks is None:
            return
        if "peak_mem_allocated" not in logs:
            logs["peak_mem_allocated"] = [rank.allocated for rank in ranks]
            logs["peak_mem_reserved"] = [rank.reserved for rank in ranks]
        logs["alloc_retries"] = [rank.retries for rank in ranks]


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


_logger = logging.getLogger("perf_metrics")

RankOFU: TypeAlias = tuple[float | None, str | None]
"""OFU of one rank, and what keeps it from having one."""


class OFUMetrics(_IntervalFigures):
    """Adds `ofu` and `ofu_per_rank` to the record of each interval.

    | added | what it is | where a rank has no figure |
    |---|---|---|
    | `ofu` | mean over all ranks, as a share | None |
    | `ofu_per_rank` | list with one entry per rank, also where there is one | absent |

    A rank's figure is the mean over its devices and over the samples since the record before: tensor pipe
    activity x SM clock / tensor clock, multiplied for each sample. Samples within an evaluation are left out,
    as MFU leaves out its time, from the event `on_prediction_step` to `on_evaluate`; saving and compiling are
    not. It is about everything that a device does, for other processes too. A record within which no sample
    falls has None; take a shorter `interval_s` if records come that fast.

    Why a figure is missing is logged once, by rank 0: no NVML, hardware before Hopper, no permission, a
    device without a known tensor clock. On several ranks the figures are gathered over the default process
    group, so every rank must have this callback and reach each log step.

    Args:
        devices: UUIDs or PCI bus ids of the devices that this process trains on. None: torch's current CUDA
            device when the training begins.
        interval_s: Seconds between samples, 0.1 to 30.
        tensor_mhz: Clock in MHz at which the tensor peak is specified. None: that of `tensor_clock`.

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
        self._find_device = devices is None
        self._sampler = OFUSampler(devices, interval_s=interval_s, tensor_mhz=tensor_mhz)
        self._tensor_mhz = tensor_mhz
        self._problem: str | None = "the training did not begin"
        self._said = self._evaluating = False

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Begin to sample."""
        self._sampler.stop()
        self._evaluating = False
        try:
            if self._find_device:
                self._sampler = OFUSampler(
                    [current_cuda_device()], interval_s=self._sampler.interval_s, tensor_mhz=self._tensor_mhz
                )
            self._sampler.start()
        except (UnavailableError, ModuleNotFoundError) as error:
            self._problem = f"unavailable: {error}"
        else:
            self._problem = None

    def _add(self, logs: MutableMapping[str, object], state: object) -> None:
        ranks = gather_ofu(self._take())
        mean = mean_of_all(figure for figure, _ in ranks)
        logs["ofu"] = mean
        if mean is not None:
            logs["ofu_per_rank"] = [figure for figure, _ in ranks]
        elif getattr(state, "is_world_process_zero", True):
            self._say_why(ranks)

    def on_prediction_step(self, args: object, state: object, control: object, **_: object) -> None:
        """An evaluation has begun."""
        if not self._evaluating:
            self._evaluating = True
            self._sampler.pause()

    def on_evaluate(self, args: object, state: object, control: object, **_: object) -> None:
        """An evaluation has ended."""
        if self._evaluating:
            self._evaluating = False
            self._sampler.resume()

    on_predict = on_step_begin = on_evaluate

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """End sampling."""
        self._sampler.stop()

    def _take(self) -> RankOFU:
        if self._problem is not None:
            return None, self._problem
        window = self._sampler.window()
        return window.ofu, "; ".join(window.problems) or None

    def _say_why(self, ranks: Sequence[RankOFU]) -> None:
        problems = [(rank, problem) for rank, (_, problem) in enumerate(ranks) if problem is not None]
        if self._said or not problems:
            return
        self._said = True
        rank, problem = problems[0]
        where = f" on {len(problems)} of {len(ranks)} ranks; rank {rank}" if len(ranks) > 1 else ""
        _logger.warning("ofu is not known%s: %s", where, problem)


def gather_ofu(local: RankOFU) -> Sequence[RankOFU]:
    """Return the figures of all ranks, in their order; a collective call if there is a process group."""
    return gather(local, _rank_ofu)


def _rank_ofu(told: Any) -> RankOFU:
    ofu, problem = told
    return None if ofu is None else float(ofu), None if problem is None else str(problem)
