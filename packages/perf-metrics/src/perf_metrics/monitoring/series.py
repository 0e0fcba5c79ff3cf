"""Names and labels of the Prometheus series that jobs export and that the rules record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..ofu.counter_files import LABEL


@dataclass(frozen=True)
class Series:
    """One series.

    Attributes:
        name: Its name; that of a counter ends in `_total`.
        text: What it is, with its unit.
        kind: A counter only grows.
        labels: Of this one, beside those of all; other series of its name have other values of them.
    """

    name: str
    text: str
    kind: Literal["gauge", "counter"] = "gauge"
    labels: tuple[tuple[str, str], ...] = ()


Figures: TypeAlias = dict[Series, float]
"""What is known; a series that is not in it is not served."""

STEP = Series("training_step", "Optimizer steps done since the very beginning.")
TOKENS = Series(
    "training_tokens_total", "Input tokens since the training began here, over all ranks.", "counter"
)
LOGGED_AT = Series("training_last_record_timestamp_seconds", "Unix time of the last record of an interval.")
MFU = Series("training_mfu_ratio", "Model FLOPs utilization in the last log interval, as a share.")
MEMORY = Series(
    "training_peak_memory_bytes",
    "Most bytes in tensors at one time, in the last log interval, on the rank with the most.",
)

DEVICE_SECONDS = "training_device_seconds_total"


def device_seconds(kind: str) -> Series:
    """Return the series of the device time of one kind, such as "steps" or "saving"."""
    text = "Device time since the training began here, over all ranks, by what it was spent on."
    return Series(DEVICE_SECONDS, text, "counter", (("kind", kind),))


_OF_AN_INTERVAL = {
    "loss": Series("training_loss", "Loss of the last log interval."),
    "grad_norm": Series("training_grad_norm", "Norm of the gradient."),
    "learning_rate": Series("training_learning_rate", "Learning rate."),
    "tok_per_sec": Series(
        "training_tokens_per_second", "Input tokens per second of net time, over all ranks."
    ),
    "mfu": MFU,
    "hfu": Series("training_hfu_ratio", "The same with what is recomputed, as a share."),
    "ofu": Series(
        "training_ofu_ratio", "Utilization by the hardware's counters, over all ranks, as a share."
    ),
}
_OF_AN_EVALUATION = {"eval_loss": Series("training_evaluation_loss", "Loss of the last evaluation.")}


def figures_of_interval(record: Mapping[str, object]) -> Figures:
    """Return what the record of an interval tells."""
    memory = _largest(record.get("peak_mem_allocated"))
    return _figures(record, _OF_AN_INTERVAL) | ({} if memory is None else {MEMORY: memory})


def figures_of_evaluation(record: Mapping[str, object]) -> Figures:
    """Return what the record of an evaluation tells."""
    return _figures(record, _OF_AN_EVALUATION)


def number(value: object) -> float | None:
    """Return a number, also out of an array without dimensions; None for what is none, such as a list."""
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    plain = tolist() if callable(tolist) else value
    return float(plain) if isinstance(plain, int | float) else None


def _figures(record: Mapping[str, object], wanted: Mapping[str, Series]) -> Figures:
    found = {series: number(record.get(entry)) for entry, series in wanted.items()}
    return {series: value for series, value in found.items() if value is not None}


def _largest(ranks: object) -> float | None:
    values = [number(value) for value in (ranks if isinstance(ranks, list | tuple) else [ranks])]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


TENSOR_CLOCK = "gpu:tensor_clock_mhz"
"""Clock in MHz at which the tensor peak is specified, by `modelName`."""
SM_CLOCK = "gpu:sm_clock_mhz"
"""SM clock in MHz that was read, by `UUID` and `GPU_I_ID`."""
DEVICE = "gpu:device:info"
"""1 for each GPU and MIG slice, with its names."""
ACTIVITY = "gpu:tensor_activity:ratio"
"""Tensor activity of each GPU and MIG slice; shares are 0 to 1."""
OFU = "gpu:ofu:ratio"
"""OFU of each GPU and MIG slice, with and without a job."""
FLEET_OFU = "fleet:ofu:ratio"
"""Mean of it over all of them."""
FLEET_OFU_IN_JOBS = "fleet:ofu_in_jobs:ratio"
"""Mean over those that a job has; a shared one counts once."""

FLEET_GPUS = "fleet:gpus:count"
"""GPUs and MIG slices by `state`: "working"; "idle", in a job whose GPU does nothing; "unallocated"."""

ACTIVITY_IN_JOB = "job_gpu:tensor_activity:ratio"
"""Tensor activity of each GPU and MIG slice, once for each job that has it; without a job, once."""
OFU_IN_JOB = "job_gpu:ofu:ratio"
SM_CLOCK_IN_JOB = "job_gpu:sm_clock_mhz"
ACTIVITY_IN_JOB_15M = "job_gpu:tensor_activity:ratio_avg15m"
OFU_IN_JOB_15M = "job_gpu:ofu:ratio_avg15m"
SM_CLOCK_IN_JOB_15M = "job_gpu:sm_clock_mhz:avg15m"

JOB_GPUS = "job:gpus:count"
"""GPUs and MIG slices of each job, also those without OFU."""
JOB_OFU = "job:ofu:ratio"
JOB_OFU_15M = "job:ofu:ratio_avg15m"
JOB_OFU_1H = "job:ofu:ratio_avg1h"
JOB_MFU = "job:mfu:ratio"
JOB_MFU_1H = "job:mfu:ratio_avg1h"
JOB_OFU_WITH_MFU = "job:ofu_with_mfu:ratio"
"""OFU while the job tells MFU: neither before its first record nor of jobs that tell none."""
JOB_OFU_WITH_MFU_1H = "job:ofu_with_mfu:ratio_avg1h"
JOB_MFU_OVER_OFU_1H = "job:mfu_over_ofu:ratio_avg1h"
"""MFU / OFU, both averaged over the last hour in which there were both."""
JOB_MFU_MINUS_OFU_1H = "job:mfu_minus_ofu:ratio_avg1h"
JOB_GOODPUT = "job:goodput:ratio"
"""Share of its device time, from its last start to the last event, that a job spent on steps."""

_DEVICE_LABELS = ("hostname", "gpu", "UUID", "modelName", "GPU_I_PROFILE", "GPU_I_ID")
"""What says which GPU or MIG slice it is, by the names of the present dcgm-exporter."""


@dataclass(frozen=True)
class FleetLabels:
    """The labels by which the recorded series are kept apart, as PromQL lists them.

    Attributes:
        job: Label that names a job, on the series of dcgm-exporter and on those of the training exporter.
        cluster: Label that names the cluster, where one server has several.

    Raises:
        ValueError: One of them is not the name of a label, or has another meaning already.
    """

    job: str = "hpc_job"
    cluster: str | None = None

    def __post_init__(self) -> None:
        given = {"job_label": self.job} | ({} if self.cluster is None else {"cluster_label": self.cluster})
        for setting, name in given.items():
            if not LABEL.fullmatch(name):
                raise ValueError(
                    f"{setting}={name!r} is not the name of a label. Use one such as hpc_job or pod."
                )
            if name in _DEVICE_LABELS:
                raise ValueError(
                    f"{setting}={name!r} is the label that tells the device. Use another one, such as "
                    "hpc_job."
                )
        if self.job == self.cluster:
            raise ValueError(
                f"cluster_label={self.cluster!r} is the job_label too. Give another one, or none."
            )

    @property
    def of_fleet(self) -> str:
        """Labels of the series of a whole fleet."""
        return _listed(self.cluster)

    @property
    def of_job(self) -> str:
        """Labels of the series of a job."""
        return _listed(self.cluster, self.job)

    @property
    def of_device(self) -> str:
        """Labels of the series of a GPU or MIG slice."""
        return _listed(self.cluster, *_DEVICE_LABELS)

    @property
    def of_device_in_job(self) -> str:
        """Labels of the series of a GPU or MIG slice in a job."""
        return _listed(self.cluster, self.job, *_DEVICE_LABELS)


def _listed(*names: str | None) -> str:
    return ", ".join(name for name in names if name is not None)
