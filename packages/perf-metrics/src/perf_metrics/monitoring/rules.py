"""Recording rules, alerts and an example config for Prometheus, as YAML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..fleet.job_samples import MOST_MHZ
from ..ofu.counter_files import CLOCK_NAME, TENSOR_NAMES
from ..ofu.samples import MAX_ACTIVITY, check_tensor_mhz, tensor_clock
from . import series
from .series import MFU, FleetLabels

_WIDTH = 110


@dataclass(frozen=True)
class RecordingRule:
    """A series that is computed again and again.

    Attributes:
        name: Of the series.
        expression: PromQL.
        comment: Stands above it.
        labels: Further labels of the series.
    """

    name: str
    expression: str
    comment: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AlertRule:
    """An alert.

    Attributes:
        name: Of the alert.
        expression: PromQL; fires for each series of its result.
        minutes: How long it has to hold before it fires.
        severity: "critical", "warning" or "info".
        summary: One line.
        description: What it means and what to do next.
    """

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    description: str


@dataclass(frozen=True)
class RuleGroup:
    """Rules that are evaluated one after the other, at one time.

    Attributes:
        name: Of the group.
        interval_s: Seconds from one evaluation to the next.
        rules: In the order in which they are evaluated.
        comment: Stands above it.
    """

    name: str
    interval_s: int
    rules: Sequence[RecordingRule | AlertRule]
    comment: str = ""


def rules_as_yaml(groups: Sequence[RuleGroup], comment: str) -> str:
    """Return the text of a file with rules."""
    lines = [*_comment(comment, 0), "groups:"]
    for group in groups:
        lines += ["", *_comment(group.comment, 2), f"  - name: {group.name}"]
        lines += [f"    interval: {group.interval_s}s", "    rules:"]
        for rule in group.rules:
            lines += _recording(rule) if isinstance(rule, RecordingRule) else _alert(rule)
    return "\n".join(lines) + "\n"


def _recording(rule: RecordingRule) -> Iterator[str]:
    yield from _comment(rule.comment, 6)
    yield f"      - record: {rule.name}"
    yield from _expression(rule.expression)
    if rule.labels:
        yield "        labels:"
        yield from (f"          {name}: {_quoted(value)}" for name, value in rule.labels.items())


def _alert(rule: AlertRule) -> Iterator[str]:
    yield f"      - alert: {rule.name}"
    yield from _expression(rule.expression)
    yield f"        for: {rule.minutes}m"
    yield "        labels:"
    yield f"          severity: {rule.severity}"
    yield "        annotations:"
    for name, text in (("summary", rule.summary), ("description", rule.description)):
        # Folded: the line breaks are read as spaces.
        yield f"          {name}: >-"
        yield from _wrapped(text, " " * 12)


def _expression(text: str) -> Iterator[str]:
    if "\n" not in text and '"' not in text:
        yield f"        expr: {_quoted(text)}"
        return
    # As it is, line by line.
    yield "        expr: |-"
    yield from (f"          {line}" for line in text.splitlines())


def _comment(text: str, indent: int) -> Iterator[str]:
    yield from _wrapped(text, " " * indent + "# ") if text else ()


def _wrapped(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _quoted(text: str) -> str:
    # A string of JSON is one of YAML.
    return json.dumps(text)


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
        series.FLEET_OFU_IN_JOBS, f"{average} ({series.OFU} and ignoring ({labels.job}) {_with_job(labels)})"
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
        "For comparison with MFU: only while the job tells MFU, so without its start.",
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
    # Only of what is there now: else a job would seem to last for the window after its end.
    return RecordingRule(name, f"avg_over_time({of}[{window}]) and {of}")


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
    return AlertRule(
        "JobGPUSlowClock",
        f"({clock} and {busy})\n"
        f"< on ({by}) group_left ()\n"
        f"({SLOW:g} * quantile by ({by}) (0.5, {clock} and {busy}))",
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


_DEVICE = (
    "GPU {{ $labels.gpu }} of {{ $labels.hostname }}"
    "{{ if $labels.GPU_I_ID }}, slice {{ $labels.GPU_I_ID }}{{ end }}"
)


_COMMENT = (
    "OFU of a fleet: recording and alert rules, written by perf-metrics fleet-files. They read "
    "dcgm-exporter's tensor activity and SM clock, and the MFU that jobs tell through PrometheusExporter of "
    "perf-metrics. Shares are 0 to 1."
)


def recording_and_alert_rules(
    *,
    job_label: str = "hpc_job",
    cluster_label: str | None = None,
    interval_s: int = 30,
    tensor_mhz: Mapping[str, float] | None = None,
) -> str:
    """Return rules for Prometheus as the text of a YAML file.

    Args:
        job_label: Label that names a job, on the series of dcgm-exporter and on those of the jobs.
        cluster_label: Label that names the cluster; None where one server has one cluster.
        interval_s: Seconds between two evaluations, 1 to 30. The scrape interval is best, as each sample then
            counts once; the hardware averages tensor activity over at most 30 seconds.
        tensor_mhz: Clocks in MHz at which the tensor peak is specified, by exact device name, for what
            `tensor_clock` does not know, or to overrule it.

    Raises:
        ValueError: An argument is not as it must be.
    """
    if isinstance(interval_s, bool) or not isinstance(interval_s, int) or not 1 <= interval_s <= 30:
        raise ValueError(f"interval_s={interval_s!r} must be a whole number of seconds, 1 to 30.")
    labels = FleetLabels(job_label, cluster_label)
    groups = [
        RuleGroup("ofu", interval_s, list(recording_rules(labels))),
        RuleGroup("ofu-alerts", interval_s, list(alert_rules(labels))),
        RuleGroup(
            "ofu-tensor-clocks",
            interval_s,
            list(tensor_clock_rules(tensor_mhz or {})),
            "Clock in MHz at which the tensor peak of each GPU is specified, from hardware-table. It is not "
            "the limit that the driver tells.",
        ),
    ]
    return rules_as_yaml(groups, _COMMENT)


_TEXT = """\
# Example, written by perf-metrics fleet-files: put in the names of your hosts.
global:
  # The hardware averages tensor activity over at most 30 s, so never scrape more rarely.
  scrape_interval: 30s
  evaluation_interval: 30s

rule_files:
  - ofu-rules.yml

scrape_configs:
  # dcgm-exporter on each node, with DCGM_FI_PROF_PIPE_TENSOR_ACTIVE and DCGM_FI_DEV_SM_CLOCK, and a label
  # {job} that names the job.
  - job_name: dcgm-exporter
    # Labels of the series, such as pod, tell who uses the GPU, and come before those of the exporter itself.
    honor_labels: true
    static_configs:
      - targets:
          - node001:9400
          - node002:9400
{labels}
  # The trainings: PrometheusExporter(host="0.0.0.0", labels={{"{job}": ...}}) on the node of rank 0. Any node
  # can be that one, so all are listed; there is nothing to scrape on the others. Where jobs share nodes, give
  # each its port, and list the targets in files (file_sd_configs).
  - job_name: training
    honor_labels: true
    static_configs:
      - targets:
          - node001:9401
          - node002:9401
{labels}"""


def example_config(*, job_label: str = "hpc_job", cluster_label: str | None = None) -> str:
    """Return an example of prometheus.yml, beside which the rules are as ofu-rules.yml.

    Args:
        job_label: Label that names a job.
        cluster_label: Label that names the cluster; None where one server has one cluster.

    Raises:
        ValueError: One of them is not the name of a label, or has another meaning already.
    """
    labels = FleetLabels(job_label, cluster_label)
    cluster = "" if labels.cluster is None else f"        labels:\n          {labels.cluster}: my-cluster\n"
    return _TEXT.format(job=labels.job, labels=cluster)
