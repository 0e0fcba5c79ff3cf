"""The recording rules: OFU of every device, job and fleet, and MFU beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..callbacks.training_series import MFU
from ..fleet.job_samples import MOST_MHZ
from ..ofu.clocks import check_tensor_mhz, tensor_clock
from ..ofu.dcgm_exporter import CLOCK_NAME, TENSOR_NAMES
from ..ofu.samples import MAX_ACTIVITY
from . import recorded_series as series
from .recorded_series import FleetLabels
from .rule_text import RecordingRule


def recording_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    """Yield the rules in the order in which they build on each other."""
    yield from _device_rules(labels)
    yield from _device_in_job_rules(labels)
    yield from _job_rules(labels)
    yield from _mfu_rules(labels)


def tensor_clock_rules(tensor_mhz: Mapping[str, float]) -> Iterator[RecordingRule]:
    """Yield one rule for each GPU whose tensor clock is known.

    Args:
        tensor_mhz: Clocks in MHz by exact device name, which come before those of `hardware_table`.

    Raises:
        ValueError: A clock is not a positive number.
    """
    for mhz in tensor_mhz.values():
        check_tensor_mhz(mhz)
    for name, mhz in {**known_tensor_clocks(), **tensor_mhz}.items():
        yield RecordingRule(series.TENSOR_CLOCK, f"vector({mhz:.10g})", labels={"modelName": name})


def known_tensor_clocks() -> dict[str, float]:
    """Return the tensor clocks in MHz of NVIDIA's GPUs in `hardware_table`, by exact device name."""
    from hardware_table import accelerators

    names = dict.fromkeys(
        name
        for accelerator in accelerators()
        if accelerator.vendor == "NVIDIA"
        for name in (accelerator.name, *accelerator.aliases)
    )
    clocks = {name: tensor_clock(name).mhz for name in names}
    return {name: mhz for name, mhz in clocks.items() if mhz is not None}


def _device_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    new, old = (_names(name, labels.of_device) for name in TENSOR_NAMES)
    yield RecordingRule(
        series.DEVICE,
        f"topk by (UUID, GPU_I_ID) (1,\n    {new}\n  or\n    {old}\n)",
        "What each GPU and MIG slice is called. A GPU is its UUID: while series of it live under two hosts, "
        "exporters or names of the metric, it has the names of one of them.",
    )
    new, old = (
        f"max by ({labels.job}, UUID, GPU_I_ID) ({name} >= 0 <= {MAX_ACTIVITY:g})" for name in TENSOR_NAMES
    )
    names = ", ".join(name for name in labels.of_device.split(", ") if name not in ("UUID", "GPU_I_ID"))
    yield RecordingRule(
        series.ACTIVITY_IN_JOB,
        f"(\n    {new}\n  or\n    {old}\n)\n* on (UUID, GPU_I_ID) group_left ({names}) {series.DEVICE}",
        "Tensor activity by the metric's new name, else by the old one, without blanks. dcgm-exporter "
        "repeats the series of a shared device for each job.",
    )
    yield RecordingRule(
        series.ACTIVITY, f"max by ({labels.of_device}) ({series.ACTIVITY_IN_JOB})", "Each device once."
    )
    yield RecordingRule(
        series.SM_CLOCK,
        f"max by (UUID, GPU_I_ID) ({CLOCK_NAME} >= 0 <= {MOST_MHZ:.0f})",
        "SM clock in MHz, without blanks and what can only be in kHz or Hz.",
    )
    yield RecordingRule(
        series.OFU,
        "(\n"
        "(\n"
        f"    {series.ACTIVITY} * on (UUID, GPU_I_ID) group_left () {series.SM_CLOCK}\n"
        "  or\n"
        f'    {series.ACTIVITY} * on (UUID) group_left () {series.SM_CLOCK}{{GPU_I_ID=""}}\n'
        ")\n"
        f"/ on (modelName) group_left () {series.TENSOR_CLOCK}\n"
        ") <= 1",
        "OFU of every GPU and MIG slice: tensor activity x SM clock / tensor clock, multiplied for each "
        "sample. A slice without a clock of its own has that of its GPU. What is above 1 cannot be true; "
        "GPUWithoutOFU counts it.",
    )
    average = f"avg by ({labels.of_fleet})" if labels.of_fleet else "avg"
    yield RecordingRule(series.FLEET_OFU, f"{average} ({series.OFU})")
    yield RecordingRule(
        series.FLEET_OFU_IN_JOBS,
        f"{average} ({series.OFU} and ignoring ({labels.job}) {_with_job(labels)})",
    )


def _device_in_job_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    pairs = f"group without () ({_with_job(labels)})"
    yield RecordingRule(
        series.OFU_IN_JOB,
        f"{pairs}\n* ignoring ({labels.job}) group_left () {series.OFU}",
        "On a shared device each job gets the device's figure: the counters know no processes.",
    )
    yield RecordingRule(
        series.SM_CLOCK_IN_JOB, f"{pairs}\n* on (UUID, GPU_I_ID) group_left () {series.SM_CLOCK}"
    )
    yield _mean(series.OFU_IN_JOB_15M, series.OFU_IN_JOB, "15m")
    yield _mean(series.SM_CLOCK_IN_JOB_15M, series.SM_CLOCK_IN_JOB, "15m")
    yield _mean(series.ACTIVITY_IN_JOB_15M, _with_job(labels), "15m")


def _job_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    yield RecordingRule(series.JOB_GPUS, f"count by ({labels.of_job}) ({_with_job(labels)})")
    yield RecordingRule(series.JOB_OFU, f"avg by ({labels.of_job}) ({series.OFU_IN_JOB})")
    yield _mean(series.JOB_OFU_15M, series.JOB_OFU, "15m")
    yield _mean(series.JOB_OFU_1H, series.JOB_OFU, "1h")


def _mfu_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    yield RecordingRule(
        series.JOB_MFU,
        f'avg by ({labels.of_job}) ({MFU.name}{{{labels.job}!=""}})',
        "What the application says of itself, through PrometheusExporter of perf-metrics.",
    )
    yield _mean(series.JOB_MFU_1H, series.JOB_MFU, "1h")
    yield RecordingRule(
        series.JOB_OFU_WITH_MFU,
        f"{series.JOB_OFU} and {series.JOB_MFU}",
        "To be held against MFU: only while the job tells MFU, so without its start.",
    )
    yield _mean(series.JOB_OFU_WITH_MFU_1H, series.JOB_OFU_WITH_MFU, "1h")
    yield RecordingRule(
        series.JOB_MFU_OVER_OFU_1H, f"{series.JOB_MFU_1H} / ({series.JOB_OFU_WITH_MFU_1H} > 0)"
    )
    yield RecordingRule(series.JOB_MFU_MINUS_OFU_1H, f"{series.JOB_MFU_1H} - {series.JOB_OFU_WITH_MFU_1H}")


def _names(metric: str, by: str) -> str:
    # `Hostname` is the label's name until May 2026.
    return f'group by ({by}) (label_replace({metric}, "hostname", "$1", "Hostname", "(.+)"))'


def _with_job(labels: FleetLabels) -> str:
    return f'{series.ACTIVITY_IN_JOB}{{{labels.job}!=""}}'


def _mean(name: str, of: str, window: str) -> RecordingRule:
    # Only of what is there now: else a job would go on for the window after its end.
    return RecordingRule(name, f"avg_over_time({of}[{window}]) and {of}")
