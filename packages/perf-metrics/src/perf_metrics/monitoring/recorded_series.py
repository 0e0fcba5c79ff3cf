"""The series that the rules record and the dashboard shows: their names, and the labels that they have."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

_DEVICE_LABELS = ("hostname", "gpu", "UUID", "modelName", "GPU_I_PROFILE", "GPU_I_ID")
"""What says which GPU or MIG slice it is, by the names of the present dcgm-exporter."""
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


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
            if not _LABEL.fullmatch(name):
                raise ValueError(
                    f"{setting}={name!r}: not the name of a label; use one such as hpc_job or pod"
                )
            if name in _DEVICE_LABELS:
                raise ValueError(f"{setting}={name!r}: this label tells the device; use one such as hpc_job")
        if self.job == self.cluster:
            raise ValueError(
                f"cluster_label={self.cluster!r}: is the job_label too; give another one, or none"
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
