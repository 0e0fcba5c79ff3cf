"""Measure `perf-metrics fleet`: a synthetic fleet of 600 jobs in 15 days, in a real Prometheus server.

    python tests/benchmarks/fleet.py --json fleet.json
    python tests/benchmarks/fleet.py --gpus 10000 --days 1 --json fleet.json --html fleet.html

Writes the fleet (like the published table of 608 production jobs, with mistakes, falls and odd GPUs planted
in known jobs), turns it into blocks with promtool, serves it, and runs the command in a process of its own,
with JSON and HTML. Prints the time of each part, MFU against OFU by number of GPUs beside the truth of the
very samples, and what of all that is planted was found. Nothing is asserted about time. Needs `prometheus`
and `promtool` on the path.

With `--gpus` the fleet is one of large jobs (64 to 2,000 GPUs), some in Slurm and some JobSets, that are
requeued and renamed; there is a report on each of the two, and the largest error of each figure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tools"))

from _fleet_found import Found, found_in
from _fleet_large import measure_large, print_large
from _fleet_tests.fleet_command import ServedFleet
from _fleet_tests.prometheus_server import PrometheusServer, missing_binaries
from _fleet_tests.synthetic_fleet import SyntheticFleet, write_fleet
from _fleet_tests.synthetic_large_plan import LargeSize
from _fleet_tests.synthetic_plan import FleetSize
from _fleet_tests.synthetic_truth import Truth
from _timing import Stopwatch, machine, print_table

AIM_S = 60.0
"""For the report, on 2 cores."""
# From a small process of its own: at its start a process counts the memory of the one that it comes from.
_LAUNCHER = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    results = _small(options) if options.gpus is None else _large(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _large(options: argparse.Namespace) -> dict[str, Any]:
    size = LargeSize(options.gpus, options.days, options.jobsets)
    results: dict[str, Any] = {
        "benchmark": "fleet --gpus",
        "machine": machine(Path.cwd(), ("httpx", "matplotlib", "numpy")),
        "size": {**asdict(size), "seed": options.seed},
    }
    with tempfile.TemporaryDirectory(prefix="fleet-benchmark-") as folder:
        results |= measure_large(size, options.seed, Path(folder), _run_measured, options.html)
    print_large(results)
    return results


def _small(options: argparse.Namespace) -> dict[str, Any]:
    size = FleetSize.scaled(options.scale)
    results: dict[str, Any] = {
        "benchmark": "fleet",
        "machine": machine(Path.cwd(), ("httpx", "matplotlib")),
        "size": {**asdict(size), "seed": options.seed},
    }
    with tempfile.TemporaryDirectory(prefix="fleet-benchmark-") as folder:
        fleet, report, measured = _measure(size, options.seed, Path(folder))
        if options.html:
            options.html.write_bytes((Path(folder) / "report.html").read_bytes())
    found = found_in(report, fleet.truth)
    results |= {
        "measured": measured,
        "agreement": _agreement(report, fleet.truth),
        "found": [asdict(one) for one in found],
        "late_jobs": [name for name, job in fleet.truth.jobs.items() if not job.exact],
        "notes": report["notes"],
    }
    _print(results, found)
    return results


def _measure(
    size: FleetSize, seed: int, folder: Path
) -> tuple[SyntheticFleet, dict[str, Any], dict[str, float]]:
    watch = Stopwatch()
    fleet = write_fleet(folder, size, seed)
    measured = {"samples": fleet.samples, "samples_of_jobs": fleet.truth.samples, "generate_s": watch.wall()}
    measured["openmetrics_mb"] = sum(path.stat().st_size for path in fleet.openmetrics) / 1e6
    server, watch = PrometheusServer(folder / "prometheus"), Stopwatch()
    for path in fleet.openmetrics:
        server.backfill(path)
        path.unlink()
    measured["backfill_s"] = watch.wall()
    with server:
        outputs = ("--json", str(folder / "report.json"), "--html", str(folder / "report.html"))
        measured |= _run_measured(ServedFleet(fleet, server).with_mfu(*outputs))
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return fleet, report, measured


def _run_measured(command: Sequence[str]) -> dict[str, float]:
    watch = Stopwatch()
    usage = subprocess.run([sys.executable, "-c", _LAUNCHER, *command], stdout=subprocess.PIPE, check=True)
    seconds = watch.wall()
    cpu_s, peak_kb = json.loads(usage.stdout)
    return {"report_s": seconds, "report_cpu_s": cpu_s, "report_peak_mb": peak_kb * 1024 / 1e6}


def _agreement(report: Mapping[str, Any], truth: Truth) -> list[dict[str, Any]]:
    """By number of GPUs and of all: what is reported, and what is true."""
    told = {
        bucket["gpus"]: bucket for bucket in [*report["agreement"]["buckets"], report["agreement"]["all"]]
    }
    true = {**{str(gpus): figures for gpus, figures in truth.by_gpus.items()}, "all": truth.figures}
    return [
        {
            "gpus": gpus,
            "reported": {name: told[gpus][name] for name in asdict(figures)},
            "true": asdict(figures),
        }
        for gpus, figures in true.items()
    ]


def _print(results: Mapping[str, Any], found: Sequence[Found]) -> None:
    measured, size = results["measured"], results["size"]
    print(
        f"{size['jobs']} jobs in {size['days']:g} days: {measured['samples']:,} samples of all metrics, "
        f"{measured['samples_of_jobs']:,} of them jobs' with activity and clock"
    )
    print()
    rows = [["part", "seconds"]]
    rows += [[part, f"{measured[f'{part}_s']:.1f}"] for part in ("generate", "backfill", "report")]
    print_table(rows)
    print()
    own = f"{measured['report_cpu_s']:.1f} s of CPU time of its own and {measured['report_peak_mb']:.0f} MB"
    met = "yes" if measured["report_s"] < AIM_S else "no"
    print(f"the report took {own}; under {AIM_S:.0f} s: {met}")
    print()
    print_table(_agreement_rows(results["agreement"]))
    print()
    print_table(
        [
            ["planted", "jobs", "found", "beside"],
            *([one.what, str(one.planted), str(one.found), str(one.beside)] for one in found),
        ]
    )
    print()
    late = results["late_jobs"]
    for one in found:
        for name in one.differs:
            print(f"{one.what}: planted or found only: {name}{', scraped late' if name in late else ''}")
    print(*results["notes"], sep="\n")


def _agreement_rows(agreement: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    heading = ["GPUs, reported (true)", "jobs", "r", "mean |MFU-OFU|", "sd", "within 10", "beyond 20"]
    formats = {
        "correlation": ".3f",
        "mae_points": ".2f",
        "sd_points": ".2f",
        "within_10": ".1%",
        "beyond_20": ".1%",
    }
    rows = [heading]
    for bucket in agreement:
        cells = [
            f"{_number(bucket['reported'][name], shown)} ({_number(bucket['true'][name], shown)})"
            for name, shown in formats.items()
        ]
        rows.append([bucket["gpus"], str(bucket["reported"]["jobs"]), *cells])
    return rows


def _number(value: float | None, shown: str) -> str:
    return "n/a" if value is None else format(value, shown)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of the fleet; 1 is 600 jobs in 15 days"
    )
    parser.add_argument("--gpus", type=int, help="make a fleet of so many GPUs and of large jobs instead")
    parser.add_argument("--days", type=float, default=1.0, help="with --gpus: its time (%(default)g)")
    parser.add_argument(
        "--jobsets",
        type=float,
        default=0.5,
        help="with --gpus: share of the GPUs that run JobSets; Slurm has the others (%(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the fleet (%(default)s)")
    parser.add_argument(
        "--json", "--output", dest="json", type=Path, metavar="PATH", help="write all results there"
    )
    parser.add_argument("--html", type=Path, metavar="PATH", help="keep the page of the report there")
    options = parser.parse_args(arguments)
    if missing := missing_binaries():
        parser.error(f"needs {' and '.join(missing)} on the path; on Debian: apt-get install prometheus")
    if options.gpus is not None:
        try:
            LargeSize(options.gpus, options.days, options.jobsets)
        except ValueError as error:
            parser.error(str(error))
    if not 0.1 <= options.scale <= 10:
        parser.error(
            f"--scale {options.scale:g}: must be 0.1 to 10; a smaller fleet has no room for what is planted"
        )
    return options


if __name__ == "__main__":
    main()
