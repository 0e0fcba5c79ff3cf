"""The callback that adds OFU, what the tensor cores were seen doing, beside MFU."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any, TypeAlias

from ..ofu.nvml import UnavailableError
from ..ofu.sampler import OFUSampler
from ..ofu.windows import mean_of_all
from ..records import is_training
from .events import EventHandlers
from .gathering import gather

_logger = logging.getLogger("perf_metrics")

RankOFU: TypeAlias = tuple[float | None, str | None]
"""OFU of one rank, and what keeps it from having one."""


class OFUMetrics(EventHandlers):
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
        self._seen: object = None

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

    def on_log_step(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures to the record of an interval; every rank has to call this."""
        self._seen = logs
        ranks = gather_ofu(self._take())
        mean = mean_of_all(figure for figure, _ in ranks)
        logs["ofu"] = mean
        if mean is not None:
            logs["ofu_per_rank"] = [figure for figure, _ in ranks]
        elif getattr(state, "is_world_process_zero", True):
            self._say_why(ranks)

    def on_log(
        self, args: object, state: object, control: object, *, logs: MutableMapping[str, object], **_: object
    ) -> None:
        """Add the figures where the trainer has no `on_log_step`."""
        if is_training(logs) and logs is not self._seen:
            self.on_log_step(args, state, control, logs=logs)

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
