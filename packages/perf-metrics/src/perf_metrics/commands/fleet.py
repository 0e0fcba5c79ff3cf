"""`perf-metrics fleet` and `fleet-files`: report on a fleet, and files that monitor it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..fleet.app_metrics import Application, mfu_from_series, read_applications
from ..fleet.collect import collect_fleet
from ..fleet.health_samples import collect_gpu_health
from ..fleet.job_identity import JobNames, read_pod_labels, read_sacct
from ..fleet.job_samples import RUN_GAP_S
from ..fleet.ledger import collect_unallocated
from ..fleet.prometheus_api import PrometheusAPI
from ..fleet.report import OutlierRule, fleet_report
from ..fleet.report_html import report_as_html
from ..fleet.report_json import report_as_json
from ..fleet.report_text import report_as_text
from ..monitoring.dashboard import grafana_dashboard
from ..monitoring.rules import example_config, recording_and_alert_rules
from ..ofu.samples import check_tensor_mhz
from . import price

if TYPE_CHECKING:
    from . import OneLineParser

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_YEAR_2000, _YEAR_2100 = 946_684_800, 4_102_444_800


def fill_fleet(parser: OneLineParser) -> None:
    """Add what `fleet` takes."""
    parser.description = (
        "Read dcgm-exporter's tensor activity and SM clock out of Prometheus, and report OFU of "
        "every job: its spread, uneven and slow devices, falls, and how far it is from the MFU that the "
        "application reports, with what may explain that; what GPU time was spent on, and which GPUs to take "
        "out. There is a report of all of it or none."
    )
    source = parser.add_argument_group("what to read")
    source.add_argument("--prometheus", required=True, metavar="URL", help="the server's address")
    source.add_argument(
        "--start", required=True, metavar="TIME", help="ISO 8601, Unix seconds, or an age: 7d, 12h, 30m"
    )
    source.add_argument("--end", default="0m", metavar="TIME", help="the same [now]")
    source.add_argument(
        "--job-label",
        type=_labels,
        default=("hpc_job",),
        metavar="LABEL,...",
        help="label that names a job, such as pod; several are joined by / [hpc_job]",
    )
    source.add_argument(
        "--job-pattern",
        metavar="REGEX",
        help="searched for in that name: its group job names the job that all series with the same are of, "
        "such as '^(?P<job>.+)-worker-\\d+$', and its group run the workload over jobs",
    )
    source.add_argument(
        "--sacct", type=Path, metavar="FILE", help="what `sacct --json` writes: users, accounts and names"
    )
    source.add_argument(
        "--kube-labels",
        action="store_true",
        help="pods of one JobSet, PyTorchJob or Job are one job, by kube_pod_labels of kube-state-metrics",
    )
    source.add_argument(
        "--run-label",
        type=_labels,
        default=(),
        metavar="LABEL,...",
        help="labels that part jobs of one name, beside cluster and a pod's namespace and UID",
    )
    source.add_argument(
        "--run-gap",
        type=float,
        default=RUN_GAP_S / 60,
        metavar="MINUTES",
        help="time without a sample after which a job's name stands for another job [%(default)g]",
    )
    source.add_argument("--selector", default="", metavar="MATCHERS", help="such as 'cluster=\"a\"'")
    source.add_argument(
        "--step", type=float, default=30.0, metavar="SECONDS", help="the scrape interval [%(default)g]"
    )
    source.add_argument(
        "--tensor-mhz",
        type=_clock,
        action="append",
        default=[],
        metavar="[NAME=]MHZ",
        help="clock of the tensor peak of devices of this name, or of all [that of hardware-table]",
    )
    source.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="sent along")
    source.add_argument("--bearer-token-file", type=Path, metavar="FILE", help="holds a token to send along")
    source.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to continue trying when the server does not answer [%(default)g]",
    )
    mfu = parser.add_argument_group("the applications' MFU").add_mutually_exclusive_group()
    mfu.add_argument("--mfu", type=Path, metavar="FILE", help=".csv or .json with job, mfu and what is known")
    mfu.add_argument("--mfu-query", metavar="PROMQL", help="series of it, such as training_mfu_ratio")
    output = parser.add_argument_group("the report")
    output.add_argument("--json", type=Path, metavar="FILE", help="write everything for programs")
    output.add_argument("--html", type=Path, metavar="FILE", help="write one page with plots (extra plot)")
    output.add_argument(
        "--outlier-points",
        type=float,
        default=OutlierRule().points,
        metavar="N",
        help="points between MFU and OFU that make an outlier [%(default)g]",
    )
    output.add_argument("--price", type=price, metavar="X", help="of one GPU hour, to show costs")
    parser.set_defaults(run=run_fleet)


def run_fleet(options: argparse.Namespace) -> int:
    """Read, print, and write what was asked for.

    Returns:
        Exit status: 0; 1 if there was no job.

    Raises:
        ModuleNotFoundError: A library of an extra is not installed.
        OSError: The server does not answer, or a file cannot be read or written.
        ValueError: An argument or a file is not as it must be.
    """
    rule = OutlierRule(points=options.outlier_points)
    now = datetime.now(UTC)
    start, end = _time(options.start, "start", now), _time(options.end, "end", now)
    applications: Mapping[str, Application] = (
        read_applications(options.mfu) if options.mfu is not None else {}
    )
    _check_outputs(options)
    server = PrometheusAPI(options.prometheus, headers=_headers(options), patience_s=options.patience)
    try:
        names = JobNames(
            options.job_label,
            pattern=options.job_pattern,
            slurm=None if options.sacct is None else read_sacct(options.sacct),
            pods=read_pod_labels(server, start, end) if options.kube_labels else None,
        )
        with _progress("counters", end - start) as progress:
            fleet = collect_fleet(
                server,
                start,
                end,
                names=names,
                selector=options.selector,
                step_s=options.step,
                tensor_mhz=_clocks(options.tensor_mhz),
                run_labels=options.run_label,
                run_gap_s=60 * options.run_gap,
                progress=progress,
            )
        asked = {"selector": options.selector, "step_s": options.step}
        with _progress("GPUs without a job", end - start) as progress:
            unallocated_hours = collect_unallocated(
                server, start, end, job_labels=options.job_label, **asked, progress=progress
            )
        with _progress("health of GPUs", end - start) as progress:
            health = collect_gpu_health(server, start, end, **asked, progress=progress)
        if options.mfu_query is not None:
            with _progress("MFU", end - start) as progress:
                applications = mfu_from_series(
                    server, options.mfu_query, fleet, names=names, progress=progress
                )
    finally:
        server.close()
    report = fleet_report(fleet, applications, rule, health=health, unallocated_hours=unallocated_hours)
    # Before the text: whoever reads that may have seen enough, and end this by it.
    if options.json is not None:
        options.json.write_text(
            json.dumps(report_as_json(report, options.price), indent=1) + "\n", encoding="utf-8"
        )
    if options.html is not None:
        options.html.write_text(report_as_html(report, options.price), encoding="utf-8")
    print(report_as_text(report, options.price))
    for path in (options.json, options.html):
        if path is not None:
            print(f"\n{path}")
    return 0 if report.jobs else 1


@contextmanager
def _progress(what: str, seconds: float) -> Iterator[Callable[[float], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        TaskProgressColumn(),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total:.1f} h"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda more: None
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=seconds / 3600)
        yield lambda more: bar.advance(task, more / 3600)


def _check_outputs(options: argparse.Namespace) -> None:
    # Before minutes of reading, not after.
    for path in (options.json, options.html):
        if path is not None and not path.parent.is_dir():
            raise ValueError(
                f"{path} cannot be written, because there is no folder {path.parent}. Create it first."
            )
        if path is not None and (path.is_dir() or str(path) == "-"):
            raise ValueError(f"{path} must be a file to write.")
    if options.json is not None and options.json == options.html:
        raise ValueError(f"{options.json} is given for both --json and --html. Give two files.")
    if options.html is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "--html needs matplotlib. Install it with `pip install 'perf-metrics[plot]'`."
            ) from error


def _time(text: str, name: str, now: datetime) -> float:
    unit = _UNITS.get(text[-1:])
    try:
        number = float(text if unit is None else text[:-1])
    except ValueError:
        return _iso_time(text, name)
    time_s = number if unit is None else now.timestamp() - number * unit
    if not _YEAR_2000 <= time_s < _YEAR_2100:
        raise ValueError(f"{name}={text!r} is not in this century. Give Unix seconds, ISO 8601 or an age.")
    return time_s


def _iso_time(text: str, name: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name}={text!r} must be ISO 8601, such as 2026-01-31T12:00:00Z, Unix seconds, or an age such "
            "as 7d."
        ) from None
    # Without an offset it is UTC, as in the report.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _clock(text: str) -> tuple[str, float]:
    name, _, mhz = text.rpartition("=")
    try:
        check_tensor_mhz(float(mhz))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be MHz, such as 1830, or NAME=MHZ") from None
    return name.strip(), float(mhz)


def _clocks(given: Sequence[tuple[str, float]]) -> float | dict[str, float] | None:
    clocks = dict(given)
    if "" in clocks and len(clocks) > 1:
        raise ValueError("tensor_mhz must be one clock for all devices, or NAME=MHZ for each, not both.")
    return clocks.get("", clocks or None)


def _labels(text: str) -> tuple[str, ...]:
    return tuple(label.strip() for label in text.split(",") if label.strip())


def _headers(options: argparse.Namespace) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in options.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            # Without the text: it may be a secret.
            raise ValueError(
                "header must be NAME:VALUE, such as X-Scope-OrgID:research, but it has no colon."
            )
        headers[name.strip()] = value.strip()
    if options.bearer_token_file is not None:
        token = options.bearer_token_file.read_text(encoding="utf-8").strip()
        headers["Authorization"] = f"Bearer {token}"
    return headers


def fill_fleet_files(parser: OneLineParser) -> None:
    """Add what `fleet-files` takes."""
    parser.description = (
        "Write ofu-rules.yml (recording rules and alerts), ofu-dashboard.json (for Grafana) and "
        "an example prometheus.yml. A file that is there with another content stays, and nothing is written."
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
    clocks = dict(map(_tensor_clock, options.tensor_mhz))
    dashboard = json.dumps(grafana_dashboard(**labels), indent=2)
    paths = {
        options.folder / "ofu-rules.yml": recording_and_alert_rules(**labels, tensor_mhz=clocks),
        options.folder / "ofu-dashboard.json": f"{dashboard}\n",
        options.folder / "prometheus.yml": example_config(**labels),
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        # Somebody's own work, such as the server's config, must not be lost.
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(
                f"{path} is there with another content. Give another folder, or move it away."
            )
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def _tensor_clock(text: str) -> tuple[str, float]:
    name, _, mhz = text.rpartition("=")
    try:
        if name.strip():
            return name.strip(), float(mhz)
    except ValueError:
        pass
    raise ValueError(f"tensor_mhz={text!r} must be NAME=MHZ, such as 'NVIDIA H100 80GB HBM3=1830'.")
