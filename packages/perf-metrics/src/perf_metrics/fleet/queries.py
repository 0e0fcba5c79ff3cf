"""The PromQL that a fleet's report is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..ofu.dcgm_exporter import CLOCK_NAME, TENSOR_NAMES

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def activity_query(job_labels: Sequence[str], selector: str, step_s: float) -> str:
    """Return the expression for tensor activity of all devices that have a job.

    `last_over_time` looks back one step and no more: a plain selector would go on with the last value for
    five minutes after a job's end. It also keeps the name, as both names of the metric may be there.

    Args:
        job_labels: Labels that name the job.
        selector: Further matchers, such as `cluster="a"`, or nothing.
        step_s: Seconds between points.

    Raises:
        ValueError: A name is not one of a label.
    """
    names = "|".join(TENSOR_NAMES)
    matchers = [f'__name__=~"{names}"', *(f'{_checked(label)}!=""' for label in job_labels)]
    return _last(",".join([*matchers, *([selector] if selector else [])]), step_s)


def clock_query(job_labels: Sequence[str], selector: str, step_s: float) -> str:
    """Return the expression for the SM clocks of the GPUs in `activity_query`.

    Joined by UUID alone: a MIG slice has the clock of its GPU, and that series need not have the slice's job.
    """
    matchers = [f'__name__="{CLOCK_NAME}"', *([selector] if selector else [])]
    return f"{_last(','.join(matchers), step_s)} and on (UUID) {activity_query(job_labels, selector, step_s)}"


def check_labels(labels: Sequence[str]) -> None:
    """Raise ValueError unless all are names of labels, and there is one."""
    if not labels:
        raise ValueError("job_labels is empty: give the label that names a job, such as hpc_job")
    for label in labels:
        _checked(label)


def _checked(label: str) -> str:
    if not _LABEL.fullmatch(label):
        raise ValueError(f"job_label={label!r}: not the name of a label; such as hpc_job or pod")
    return label


def _last(matchers: str, step_s: float) -> str:
    # One millisecond less than a step: up to version 2 both ends of the window belong to it.
    return f"last_over_time({{{matchers}}}[{round(step_s * 1000) - 1}ms])"
