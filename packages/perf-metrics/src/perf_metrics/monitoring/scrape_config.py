"""An example of the config that lets Prometheus scrape a fleet and evaluate the rules."""

from __future__ import annotations

from .recorded_series import FleetLabels

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
