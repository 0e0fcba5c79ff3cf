"""Rules for Prometheus that record OFU of a fleet, and alert on it."""

from __future__ import annotations

from collections.abc import Mapping

from .alert_rules import alert_rules
from .recorded_series import FleetLabels
from .recording_rules import recording_rules, tensor_clock_rules
from .rule_text import RuleGroup, rules_as_yaml

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
        raise ValueError(f"interval_s={interval_s!r}: must be a whole number of seconds, 1 to 30")
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
