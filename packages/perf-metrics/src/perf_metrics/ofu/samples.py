"""What every reader of counters gives back: samples of tensor activity and clock, and OFU from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .clocks import check_tensor_mhz, ofu_from_activity

_Key = TypeVar("_Key", bound=Hashable)

MAX_ACTIVITY = 1.01
"""A share of cycles is at most 1; what passes it by less than this is taken for rounding and kept as read."""


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU, or the slice of one, that a sample was taken on; None for what the source does not tell.

    Attributes:
        host: Name of the node.
        index: Number of the GPU on its node, as the source counts them.
        uuid: UUID of the GPU, for a slice that of its GPU.
        model: Name of the GPU, such as "NVIDIA H100 80GB HBM3".
        mig_profile: Profile of the MIG slice, such as "1g.10gb".
        mig_instance: The MIG slice by the source's own numbering.
    """

    host: str | None = None
    index: str | None = None
    uuid: str | None = None
    model: str | None = None
    mig_profile: str | None = None
    mig_instance: str | None = None

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice and not a whole GPU."""
        return self.mig_instance is not None

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What stays when its host, its exporter or its number is renamed: UUID and slice.

        Without a UUID it is everything else.
        """
        if self.uuid is None:
            return self.host, self.index, self.model, self.mig_profile, self.mig_instance
        return self.uuid, self.mig_profile, self.mig_instance

    def __str__(self) -> str:
        gpu = f"GPU {self.index}" if self.index is not None else self.uuid
        # Without a host, many devices are GPU 0.
        uuid = self.uuid if self.host is None and self.index is not None else None
        mig = " ".join(text for text in (self.mig_instance, self.mig_profile) if text)
        return ", ".join(text for text in (self.host, gpu, uuid, mig) if text) or "unnamed device"


@dataclass(frozen=True, slots=True)
class Job:
    """Who used a device, by the labels of the source, such as hpc_job or pod, namespace and container."""

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Job | None:
        """Return the job with these labels, empty ones left out; None if none is left."""
        told = tuple(sorted((name, value) for name, value in labels.items() if value))
        return cls(told) if told else None

    def label(self, name: str) -> str | None:
        """Return the value of a label, or None."""
        return dict(self.labels).get(name)

    @property
    def name(self) -> str:
        """`hpc_job`, else namespace/pod, else all labels in one."""
        labels = dict(self.labels)
        if "hpc_job" in labels:
            return labels["hpc_job"]
        if "pod" in labels:
            return "/".join(labels[name] for name in ("namespace", "pod") if name in labels)
        return ",".join(f"{name}={value}" for name, value in self.labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one device.

    Attributes:
        device: Where it was taken.
        tensor_activity: Share of cycles with tensor-core instructions, 0 to 1, averaged by the hardware over
            the collection window; None when it could not be read.
        sm_mhz: SM clock in MHz at that moment; None when it could not be read.
        time_s: Seconds, Unix time unless the reader's notes say otherwise; None when the source has no times.
        jobs: Who used the device then. More than one where the device is shared: the reading is the device's.
    """

    device: Device
    tensor_activity: float | None
    sm_mhz: float | None
    time_s: float | None = None
    jobs: tuple[Job, ...] = ()


@dataclass(frozen=True)
class Readings:
    """The samples of a source, and what the source lacked or what of it was not used, in sentences."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeanOFU:
    """OFU over some samples.

    Attributes:
        ofu: As a share, or None when it cannot be told.
        samples: Number of samples in it.
        left_out: Number of samples that are not in it.
        reason: Why `ofu` is None, or why samples were left out; None when there is nothing to say.
    """

    ofu: float | None
    samples: int
    left_out: int = 0
    reason: str | None = None

    def __str__(self) -> str:
        return f"unavailable: {self.reason}" if self.ofu is None else f"{self.ofu:.1%}"


def mean_ofu(samples: Iterable[Sample], tensor_mhz: float | None) -> MeanOFU:
    """Return the mean of tensor activity x SM clock / tensor clock, multiplied per sample and then averaged.

    The definition of "Instant GPU Efficiency Visibility at Fleet Scale". Activity and clock move together, so
    the product of their averages is another number. Every sample has the same weight.

    Args:
        samples: Of one kind of device. A slice's work is in its whole GPU's samples too: give either.
        tensor_mhz: Clock in MHz at which the tensor-core peak of the device is specified (H100 SXM: 1830, not
            the boost limit of 1980); None when unknown.

    Raises:
        ValueError: `tensor_mhz` is not a positive finite number.
    """
    if tensor_mhz is not None:
        check_tensor_mhz(tensor_mhz)
    complete: list[tuple[float, float]] = []
    no_activity = no_clock = 0
    for sample in samples:
        if sample.tensor_activity is None:
            no_activity += 1
        elif sample.sm_mhz is None:
            no_clock += 1
        else:
            complete.append((sample.tensor_activity, sample.sm_mhz))
    left_out = no_activity + no_clock
    reason = _reason(len(complete), no_activity, no_clock)
    if not complete:
        return MeanOFU(None, 0, left_out, reason)
    if tensor_mhz is None:
        return MeanOFU(None, 0, left_out + len(complete), "the tensor clock of the device is not known")
    total = math.fsum(ofu_from_activity(activity, sm_mhz, tensor_mhz) for activity, sm_mhz in complete)
    return MeanOFU(total / len(complete), len(complete), left_out, reason)


def mean_ofu_by_device(samples: Iterable[Sample], tensor_mhz: float | None) -> dict[Device, MeanOFU]:
    """Return `mean_ofu` of each device, in the order in which they appear."""
    return _by(((sample.device, sample) for sample in samples), tensor_mhz)


def mean_ofu_by_job(
    samples: Iterable[Sample], tensor_mhz: float | None, label: str | None = None
) -> dict[str, MeanOFU]:
    """Return `mean_ofu` of each job over its devices, in the order in which they appear.

    On a device that jobs share, each of them gets the device's figure: the counters know no processes.

    Args:
        samples: Samples without a job are not in the result.
        tensor_mhz: As for `mean_ofu`.
        label: Label that names the job, such as "pod"; by default `Job.name`.
    """
    return _by(
        (
            (name, sample)
            for sample in samples
            # Two containers of one pod make one job.
            for name in dict.fromkeys(job.name if label is None else job.label(label) for job in sample.jobs)
            if name is not None
        ),
        tensor_mhz,
    )


def _by(keyed: Iterable[tuple[_Key, Sample]], tensor_mhz: float | None) -> dict[_Key, MeanOFU]:
    groups: defaultdict[_Key, list[Sample]] = defaultdict(list)
    for key, sample in keyed:
        groups[key].append(sample)
    return {key: mean_ofu(group, tensor_mhz) for key, group in groups.items()}


def _reason(used: int, no_activity: int, no_clock: int) -> str | None:
    if not used + no_activity + no_clock:
        return "there are no samples"
    lacks = [
        f"{count} of {used + no_activity + no_clock} samples lack the {what}"
        for count, what in ((no_activity, "tensor activity"), (no_clock, "SM clock"))
        if count
    ]
    return "; ".join(lacks) or None


def check_activity(value: float) -> float | None:
    """Return `value`, or None if it is not a share of cycles."""
    return value if 0 <= value <= MAX_ACTIVITY else None
