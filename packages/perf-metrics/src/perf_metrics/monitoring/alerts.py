"""Alerts on what the rules record: which job or GPU to look at, and why."""

from __future__ import annotations

from collections.abc import Iterator

from ..fleet.job_samples import MOST_MHZ
from ..ofu.counter_files import CLOCK_NAME, TENSOR_NAMES
from ..ofu.samples import MAX_ACTIVITY
from . import series
from .rule_file import AlertRule
from .series import FleetLabels

FALL = 0.2
"""Share of its own past by which a job's OFU falls."""
APART = 0.1
"""Difference between MFU and OFU, as a share of peak."""
FAR_BELOW = 0.5
"""A device's OFU over the median of its job."""
SLOW = 0.85
"""A device's SM clock over the median of its job."""
BUSY = 0.05
"""Tensor activity from which on a device is taken to work, and not to wait with a low clock."""
MORE = 1.2
"""A device's OFU over the median of its job from which on nobody waits for it."""
NOTHING = 0.001


def alert_rules(labels: FleetLabels) -> Iterator[AlertRule]:
    """Yield the alerts."""
    job = f"{{{{ $labels.{labels.job} }}}}"
    yield _fell(labels, job)
    yield _apart(job)
    yield _works_less(labels, job)
    yield _slow_clock(labels, job)
    yield _no_activity(labels, job)
    yield _unknown_clock()
    yield _without_ofu()
    yield _activity_above_1()
    yield _mfu_above_1(job)


def _fell(labels: FleetLabels, job: str) -> AlertRule:
    past = f"avg_over_time({series.JOB_OFU}[6h] offset 15m)"
    return AlertRule(
        "JobOFUFell",
        f"{series.JOB_OFU_15M} / ({past} > {NOTHING:g}) < {1 - FALL:g}\nand {series.JOB_OFU} offset 75m",
        30,  # longer than most evaluations and saves
        "warning",
        f"OFU of job {job} fell to {{{{ $value | humanizePercentage }}}} of what it was",
        "The mean over the last 15 minutes, as a share of the mean over the six hours before. If MFU fell "
        "with it, the job has become slower: look for what changed at that time (a debug setting, the "
        "loader, the network, a device with a low clock), and take a profiler trace. If MFU did not fall, "
        "the job is evaluating or saving, which MFU leaves out, or its count of FLOPs has changed.",
    )


def _apart(job: str) -> AlertRule:
    difference = series.JOB_MFU_MINUS_OFU_1H
    return AlertRule(
        "JobMFUAndOFUDiffer",
        f"{difference} > {APART:g} or {difference} < -{APART:g}",
        30,
        "warning",
        f"MFU of job {job} less OFU of its GPUs is {{{{ $value | humanizePercentage }}}} of peak",
        "Both are averaged over the last hour. MFU above OFU: the count of FLOPs is too high (experts "
        "counted as dense, layers of another type, a causal mask not halved), or the peak too low. MFU below "
        "OFU: recomputation is not counted, the peak is that with sparsity, or others use the GPUs too. "
        "perf_metrics.diagnose(mfu, ofu) lists the mistakes that fit, and perf-metrics flops --check holds "
        "the count against a counter. Long evaluations and saves are in OFU and not in MFU.",
    )


def _works_less(labels: FleetLabels, job: str) -> AlertRule:
    ofu = series.OFU_IN_JOB_15M
    return AlertRule(
        "JobGPUWorksLess",
        f"{ofu}\n"
        f"< on ({labels.of_job}) group_left ()\n"
        f"({FAR_BELOW:g} * (quantile by ({labels.of_job}) (0.5, {ofu}) > {BUSY:g}))",
        15,
        "warning",
        f"{_DEVICE} does far less than the others of job {job}",
        "Its OFU over the last 15 minutes is {{ $value | humanizePercentage }}, less than half of the median "
        "of the job's devices. Is it in use at all (nvidia-smi), is the work uneven (stages of a pipeline, "
        "experts), or does its process hang? If it is alone with this in other jobs too, take its node out.",
    )


def _slow_clock(labels: FleetLabels, job: str) -> AlertRule:
    # Kinds of GPU differ in clock, and one that does nothing may have a low clock.
    by = f"{labels.of_job}, modelName"
    clock, busy = series.SM_CLOCK_IN_JOB_15M, f"{series.ACTIVITY_IN_JOB_15M} > {BUSY:g}"
    ofu = series.OFU_IN_JOB_15M
    return AlertRule(
        "JobGPUSlowClock",
        f"(({clock} and {busy})\n"
        f"< on ({by}) group_left ()\n"
        f"({SLOW:g} * quantile by ({by}) (0.5, {clock} and {busy})))\n"
        # One that does more than the others, such as a longer stage of a pipeline, has a clock of its own.
        f"unless ({ofu}\n"
        f"> on ({by}) group_left ()\n"
        f"({MORE:g} * quantile by ({by}) (0.5, {ofu})))",
        15,
        "warning",
        f"{_DEVICE} holds up job {job} with a low clock",
        'It works, and its SM clock over the last 15 minutes is {{ $value | printf "%.0f" }} MHz, less than '
        "85 % of the median of the job's devices, which wait for it. nvidia-smi -q -d "
        "PERFORMANCE,POWER,TEMPERATURE on that node tells whether heat, power or a limit that somebody set "
        "is why. Until that is repaired, take the node out.",
    )


def _no_activity(labels: FleetLabels, job: str) -> AlertRule:
    return AlertRule(
        "JobWithoutTensorActivity",
        f'max by ({labels.of_job}) ({series.ACTIVITY_IN_JOB}{{{labels.job}!=""}}) < {NOTHING:g}',
        30,
        "warning",
        f"No GPU of job {job} has used its tensor cores for 30 minutes",
        "The job hangs, waits for data, has ended without giving its GPUs back, or computes without tensor "
        "cores (FP32 without TF32). Look at its log and at the stacks of its processes (py-spy dump); with "
        "NCCL, a rank that died leaves the others waiting.",
    )


def _unknown_clock() -> AlertRule:
    return AlertRule(
        "GPUTensorClockUnknown",
        f"count by (modelName) ({series.ACTIVITY}) unless on (modelName) {series.TENSOR_CLOCK}",
        15,
        "info",
        "OFU of {{ $value }} devices of the type {{ $labels.modelName }} is not known",
        "hardware-table has no clock under this name at which the tensor peak is specified. It is peak / "
        "(number of SMs x FLOPs per cycle of one SM). Write these rules again with perf-metrics fleet-files "
        "--tensor-mhz '{{ $labels.modelName }}=MHZ'.",
    )


def _without_ofu() -> AlertRule:
    return AlertRule(
        "GPUWithoutOFU",
        f"count by (modelName) (\n"
        f"  ({series.ACTIVITY} and on (modelName) {series.TENSOR_CLOCK})\n"
        f"  unless on (UUID, GPU_I_ID) {series.OFU}\n"
        ")",
        15,
        "info",
        "{{ $value }} devices of the type {{ $labels.modelName }} have tensor activity and no OFU",
        f"Either {CLOCK_NAME} is not exported for them, or it cannot be true: above {MOST_MHZ:.0f} MHz, as "
        "where it is in kHz, or so high that OFU would be above 100 %. These devices are in no mean.",
    )


def _activity_above_1() -> AlertRule:
    above = " or ".join(f"({name} > {MAX_ACTIVITY:g} < 1e9)" for name in TENSOR_NAMES)
    return AlertRule(
        "GPUActivityAbove1",
        f"count by (modelName) (group by (UUID, GPU_I_ID, modelName) ({above}))",
        15,
        "warning",
        "{{ $value }} devices of the type {{ $labels.modelName }} show a tensor activity above 1",
        "It is a share of cycles, so that it cannot be. Is it in percent? These values are in no mean. "
        "Change the unit where the series is made.",
    )


def _mfu_above_1(job: str) -> AlertRule:
    return AlertRule(
        "JobMFUAbove1",
        f"{series.JOB_MFU} > 1",
        5,
        "warning",
        f"Job {job} reports an MFU of {{{{ $value | humanizePercentage }}}}",
        "More than the peak cannot be: the peak is that of another device or type, or of one device of "
        "several, the count of FLOPs is too high, or the value is in percent. perf-metrics flops --check "
        "holds the count against a counter.",
    )


_DEVICE = (
    "GPU {{ $labels.gpu }} of {{ $labels.hostname }}"
    "{{ if $labels.GPU_I_ID }}, slice {{ $labels.GPU_I_ID }}{{ end }}"
)
