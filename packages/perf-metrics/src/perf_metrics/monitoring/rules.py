"""Recording rules, alerts and an example config for Prometheus, as YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..fleet.job_samples import MOST_MHZ
from ..ofu.counter_files import CLOCK_NAME, TENSOR_NAMES
from ..ofu.samples import MAX_ACTIVITY, check_tensor_mhz, tensor_clock
from . import series
from .alerts import NOTHING, alert_rules
from .rule_file import RecordingRule, RuleGroup, rules_as_yaml
from .series import DEVICE_SECONDS, MFU, FleetLabels


def recording_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    """Yield the rules in the order in which they build on each other."""
    yield from _device_rules(labels)
    yield from _device_in_job_rules(labels)
    yield from _gpu_count_rules(labels)
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


def _gpu_count_rules(labels: FleetLabels) -> Iterator[RecordingRule]:
    count = f"count by ({labels.of_fleet})" if labels.of_fleet else "count"
    in_jobs = f"max by ({labels.of_device}) ({series.ACTIVITY_IN_JOB_15M})"
    sliced = f'({series.ACTIVITY}{{GPU_I_ID=""}} and on (UUID) {series.ACTIVITY}{{GPU_I_ID!=""}})'
    states = {
        "working": f"{in_jobs} >= {NOTHING:g}\nunless {sliced}",
        "idle": f"{in_jobs} < {NOTHING:g}\nunless {sliced}",
        "unallocated": f"{series.ACTIVITY}\nunless on (UUID, GPU_I_ID) {_with_job(labels)}\nunless {sliced}",
    }
    for state, devices in states.items():
        comment = "GPUs and MIG slices, by the last 15 minutes. A GPU with slices counts as its slices."
        yield RecordingRule(
            series.FLEET_GPUS,
            f"{count} (\n{devices}\n)",
            comment if state == "working" else "",
            {"state": state},
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
    of_job = f"sum by ({labels.of_job})"
    yield RecordingRule(
        series.JOB_GOODPUT,
        f'{of_job} ({DEVICE_SECONDS}{{{labels.job}!="", kind="steps"}})\n'
        f'/ {of_job} ({DEVICE_SECONDS}{{{labels.job}!=""}})',
        "From its last start to the last event; PrometheusExporter tells it where it has a GoodputLogger.",
    )


def _names(metric: str, by: str) -> str:
    # `Hostname` is the label's name until May 2026.
    return f'group by ({by}) (label_replace({metric}, "hostname", "$1", "Hostname", "(.+)"))'


def _with_job(labels: FleetLabels) -> str:
    return f'{series.ACTIVITY_IN_JOB}{{{labels.job}!=""}}'


def _mean(name: str, of: str, window: str) -> RecordingRule:
    # Only of what is there now: else a job would seem to last for the window after its end.
    return RecordingRule(name, f"avg_over_time({of}[{window}]) and {of}")


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
