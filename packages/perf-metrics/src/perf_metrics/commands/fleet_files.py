"""`perf-metrics fleet-files`: rules, dashboard and example config for a fleet's Prometheus and Grafana."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..monitoring.dashboard import grafana_dashboard
from ..monitoring.rules import recording_and_alert_rules
from ..monitoring.scrape_config import example_config

if TYPE_CHECKING:
    from .parser import Subparsers


def add_fleet_files(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "fleet-files",
        help="write rules and alerts for Prometheus and a dashboard for Grafana that show OFU of a fleet",
        description="Write ofu-rules.yml (recording rules and alerts), ofu-dashboard.json (for Grafana) and "
        "an example prometheus.yml. A file that is there with another content stays, and nothing is written.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write; created if it is not there")
    parser.add_argument(
        "--job-label", default="hpc_job", metavar="LABEL", help="label that names a job [%(default)s]"
    )
    parser.add_argument(
        "--cluster-label", metavar="LABEL", help="label that names the cluster, if a server has several"
    )
    parser.add_argument(
        "--tensor-mhz",
        action="append",
        default=[],
        metavar="NAME=MHZ",
        help="clock of the tensor peak of a GPU, by exact name; again for each [by hardware-table]",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    labels = {"job_label": options.job_label, "cluster_label": options.cluster_label}
    clocks = dict(_clock(text) for text in options.tensor_mhz)
    dashboard = json.dumps(grafana_dashboard(**labels), indent=2)
    _write(
        options.folder,
        {
            "ofu-rules.yml": recording_and_alert_rules(**labels, tensor_mhz=clocks),
            "ofu-dashboard.json": f"{dashboard}\n",
            "prometheus.yml": example_config(**labels),
        },
    )
    return 0


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / name: text for name, text in files.items()}
    for path, text in paths.items():
        # Somebody's own work, such as the server's config, must not be lost.
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(
                f"{path} is there with another content; give another folder, or move it away"
            )
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
        print(path)


def _clock(text: str) -> tuple[str, float]:
    name, equals, mhz = text.rpartition("=")
    try:
        clock = float(mhz)
    except ValueError:
        clock = None
    if not equals or not name.strip() or clock is None:
        raise ValueError(f"tensor_mhz={text!r}: must be NAME=MHZ, such as 'NVIDIA H100 80GB HBM3=1830'")
    return name.strip(), clock
