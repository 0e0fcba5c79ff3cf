"""A day of thousands of GPUs, in Slurm and in Kubernetes: what a report on it costs, and its errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _fleet_tests.fleet_command import fleet_command
from _fleet_tests.prometheus_server import PrometheusServer
from _fleet_tests.synthetic_large import LargeFleet
from _fleet_tests.synthetic_large_check import compared
from _fleet_tests.synthetic_large_plan import LargeSize, Style
from _timing import Stopwatch, print_table

AIM_S, AIM_MB = 300.0, 4096 * 1.048576
"""For one report on 10,000 GPUs over a day, on 2 cores: five minutes and 4 GiB."""
_TWO_HOURS = ("--storage.tsdb.min-block-duration=2h", "--storage.tsdb.max-block-duration=2h")
"""As the blocks are: the server would else join them while it is measured."""
_NAMED_BY: dict[Style, tuple[str, ...]] = {
    "slurm": ("--sacct", "sacct.json"),
    "jobsets": ("--job-label", "pod", "--kube-labels"),
}

Measure = Callable[[Sequence[str]], dict[str, float]]
"""Runs a command of its own process, and returns its seconds, CPU seconds and peak memory."""


def measure_large(
    size: LargeSize, seed: int, folder: Path, measure: Measure, html: Path | None
) -> dict[str, Any]:
    """Make the fleet, serve it, report on the jobs of each style, and compare.

    Args:
        size: Of the fleet.
        seed: Of the fleet.
        folder: For files; some gigabytes.
        measure: Runs a command.
        html: Where to keep the page; of two styles the name of the style is put in.
    """
    watch = Stopwatch()
    fleet = LargeFleet(size, seed)
    fleet.write_sacct(folder / "sacct.json")
    made: dict[str, float] = {"generate_s": watch.wall()}
    server = PrometheusServer(folder / "prometheus", options=_TWO_HOURS)
    made["generate_s"] += _backfill(server, fleet.pieces(folder))
    made |= {"generate_and_backfill_s": watch.wall(), "samples": fleet.samples}
    styles = [style for style in _NAMED_BY if size.hosts(style)]
    reports = []
    with server:
        for style in styles:
            page = folder / f"{style}.html"
            paths = ("--json", str(folder / f"{style}.json"), "--html", str(page))
            times = ("--start", str(fleet.start_s), "--end", str(fleet.end_s))
            names = [str(folder / one) if one.endswith(".json") else one for one in _NAMED_BY[style]]
            figures = measure(fleet_command("--prometheus", server.url, *times, *names, *paths))
            report: dict[str, Any] = json.loads((folder / f"{style}.json").read_text())
            truth = fleet.of_style(style)
            reports.append(
                {
                    "style": style,
                    "gpus": 8 * size.hosts(style),
                    "jobs": len(truth),
                    "samples": sum(job.samples for job in truth.values()),
                    **figures,
                    "compared": [asdict(one) for one in compared(report, truth, fleet.errors)],
                    "notes": report["notes"],
                }
            )
            if html is not None:
                shutil.copyfile(page, html if len(styles) == 1 else html.with_stem(f"{html.stem}-{style}"))
    return {"made": made, "reports": reports, "load": os.getloadavg()}


def _backfill(server: PrometheusServer, pieces: Iterator[Path]) -> float:
    """Fill the server with files as they are written, two at a time; return the seconds of writing."""
    seconds, filling = 0.0, list[Future[None]]()
    with ThreadPoolExecutor(2) as pool:
        while True:
            watch = Stopwatch()
            path = next(pieces, None)
            seconds += watch.wall()
            if path is None:
                break
            filling.append(pool.submit(_fill, server, path))
            if len(filling) > 2:  # files of a gigabyte
                filling.pop(0).result()
        for one in filling:
            one.result()
    return seconds


def _fill(server: PrometheusServer, path: Path) -> None:
    server.backfill(path)
    path.unlink()


def print_large(results: Mapping[str, Any]) -> None:
    """Print what was measured, and planted beside reported."""
    made, size = results["made"], results["size"]
    print(
        f"{size['gpus']:,} GPUs in {size['days']:g} days: {made['samples']:,} samples; made in "
        f"{made['generate_and_backfill_s']:.0f} s, {made['generate_s']:.0f} s of them writing"
    )
    for report in results["reports"]:
        seconds, memory = report["report_s"], report["report_peak_mb"]
        met = "yes" if seconds < AIM_S and memory < AIM_MB else "no"
        print()
        print(
            f"{report['style']}: {report['gpus']:,} GPUs, {report['jobs']} jobs with {report['samples']:,} "
            f"samples; the report took {seconds:.0f} s, {report['report_cpu_s']:.0f} s of CPU time of its "
            f"own and {memory:.0f} MB; under {AIM_S:.0f} s and 4 GiB: {met}"
        )
        print_table(list(_rows(report["compared"])))
        print(*report["notes"], sep="\n")


def _rows(found: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    yield ["figure", "planted", "found", "beside", "largest error"]
    for one in found:
        error = "" if one["error"] is None else f"{one['error']:.2g}"
        yield [one["what"], *(str(one[name]) for name in ("planted", "found", "beside")), error]
