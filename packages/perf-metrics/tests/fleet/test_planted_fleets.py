"""Planted fleets against planted truth: requeues, renames, overlaps, unit mistakes, names used again.

By seeds; `PROPERTY_EXAMPLES=50` runs fifty times as many.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from urllib.parse import parse_qs

import pytest

from perf_metrics import FleetReport, PrometheusAPI, collect_fleet, fleet_report
from perf_metrics.ofu.counter_files import CLOCK_NAME, TENSOR_NAMES

EXAMPLES = 24 * int(os.environ.get("PROPERTY_EXAMPLES", "1"))
MODEL, TENSOR_MHZ, STEP_S = "NVIDIA H100 80GB HBM3", 1830.0, 30
START_S, HOURS = 1_767_225_600, 30
HOUR_S = 3600


@dataclass
class Series:
    """A series with its values by Unix time in seconds."""

    labels: dict[str, str]
    values: dict[int, float] = field(default_factory=dict)


@dataclass
class Run:
    """What is true of one job: OFU and seconds of each sample that is true, by GPU; and whether OFU fell."""

    name: str
    gpus: int
    start_s: int
    fell: bool = False
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return mean_of([one for of_gpu in self.samples.values() for one in of_gpu])


def mean_of(samples: list[tuple[float, int]]) -> float:
    return sum(ofu * seconds for ofu, seconds in samples) / sum(seconds for _, seconds in samples)


class Server(ThreadingHTTPServer):
    """Answers range queries for tensor activity and SM clock out of planted series, as Prometheus would."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.series: list[Series] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        first, last, step = (round(float(form[name][0])) for name in ("start", "end", "step"))
        is_clock = form["query"][0].startswith(f'last_over_time({{__name__="{CLOCK_NAME}"')
        result = []
        for one in self.server.series:
            if (one.labels["__name__"] == CLOCK_NAME) is not is_clock:
                continue
            # The last value of the step before each point.
            points = {-(-(time_s - first) // step): value for time_s, value in one.values.items()}
            rows = [
                [first + n * step, repr(value)]
                for n, value in sorted(points.items())
                if 0 <= n <= (last - first) // step
            ]
            if rows:
                result.append({"metric": one.labels, "values": rows})
        body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Planted:
    """A fleet of some jobs by a seed, and what is true of it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.series: list[Series] = []
        self.runs: list[Run] = []
        self.refused = 0
        self._gpus = 0
        for number in range(self.random.randint(1, 4)):
            begin = START_S + self.random.randint(1, 2 * HOUR_S)
            kind = self.random.choice(("plain", "requeued", "again", "two clusters"))
            self._plant(f"job-{number}", kind, begin)

    def _plant(self, name: str, kind: str, begin: int) -> None:
        level, gpus = self.random.uniform(0.2, 0.45), self.random.choice((1, 2, 3, 4, 8))
        lasts = self.random.randint(45, 120) * 60
        if kind == "plain":
            self._part(self._run(name, gpus, begin), begin, begin + lasts, level, self._new(gpus))
        elif kind == "requeued":
            # After a wait it continues elsewhere or, at times, on some of the same GPUs, and may be slower.
            run, own = self._run(name, gpus, begin), self._new(gpus)
            run.fell = self.random.random() < 0.5
            self._part(run, begin, begin + lasts, level, own)
            later = begin + lasts + self.random.randint(2, 50) * 60
            kept = own[: self.random.randint(0, gpus)]
            again = kept + self._new(gpus - len(kept))
            self._part(run, later, later + lasts, level * (0.5 if run.fell else 1), again)
        elif kind == "again":
            # Another job of the same name, hours later, with a level and a size of its own.
            first, second = (
                self._run(f"{name}#1", gpus, begin),
                begin + lasts + self.random.randint(70, 600) * 60,
            )
            own = self._new(gpus)
            self._part(first, begin, begin + lasts, level, own, name=name)
            more = self.random.choice((1, 2, 8))
            then = self._run(f"{name}#2", more, second)
            self._part(then, second, second + lasts, level / 2, (own + self._new(more))[:more], name=name)
        else:
            for cluster, share in (("a", 1.0), ("b", 0.5)):
                start = begin + (0 if cluster == "a" else 600)
                run = self._run(f"{name}#{1 if cluster == 'a' else 2}", gpus, start)
                self._part(
                    run, start, start + lasts, level * share, self._new(gpus), name=name, cluster=cluster
                )

    def _run(self, name: str, gpus: int, start_s: int) -> Run:
        self.runs.append(Run(name, gpus, start_s))
        return self.runs[-1]

    def _new(self, count: int) -> list[str]:
        self._gpus += count
        return [f"GPU-{self._gpus - place}" for place in range(count)]

    def _part(
        self, run: Run, begin: int, end: int, level: float, gpus: list[str], name: str = "", **more: str
    ) -> None:
        every = self.random.choice((30, 30, 60, 120))
        wrong_unit = self.random.random() < 0.2
        for index, gpu in enumerate(gpus):
            if len(gpus) > 1 and index == 1:
                every = self.random.choice((30, 60, 120))  # another node, another exporter
            times = range(begin + self.random.randrange(every), end, every)
            labels = {"hpc_job": name or run.name, "UUID": gpu, "gpu": str(index), "modelName": MODEL, **more}
            rows = []
            bad = range(begin + 600, begin + 1200) if wrong_unit and index == 0 else range(0)
            for time_s in times:
                activity = round(level * self.random.uniform(0.97, 1.03), 6)
                mhz = float(self.random.randint(1200, 1500))
                rows.append((time_s, activity, mhz * 1000 if time_s in bad else mhz))
                if time_s in bad:
                    self.refused += 1
                else:
                    run.samples.setdefault(gpu, []).append((activity * mhz / TENSOR_MHZ, every))
            self._series(labels, rows, begin, end)

    def _series(
        self, labels: dict[str, str], rows: list[tuple[int, float, float]], begin: int, end: int
    ) -> None:
        """Under one name, or renamed in between, with or without a time of both."""
        middle = self.random.randint(begin, end)
        kind = self.random.choice(("one", "renamed", "overlap", "both"))
        both = {"one": 0, "renamed": 0, "overlap": 900, "both": end}[kind]
        host = labels["UUID"].replace("GPU", "node")
        first, second = {"Hostname": host, "instance": "a"}, {"hostname": f"{host}.cluster", "gpu": "7"}
        parts = [
            (
                first,
                TENSOR_NAMES[1],
                begin if kind != "renamed" else 0,
                end if kind in ("one", "both") else middle + both,
            )
        ]
        if kind != "one":
            parts.append(
                (second, TENSOR_NAMES[self.random.randint(0, 1)], begin if kind == "both" else middle, end)
            )
        for names, metric, since, until in parts:
            for place, series in ((1, metric), (2, CLOCK_NAME)):
                values = {row[0]: row[place] for row in rows if since <= row[0] < until}
                self.series.append(Series({**labels, **names, "__name__": series}, values))
        self.random.shuffle(self.series)


@pytest.mark.parametrize("block", range(4))
def test_a_planted_fleet_is_reported_as_it_is(server: Server, block: int) -> None:
    for seed in range(block * EXAMPLES // 4, (block + 1) * EXAMPLES // 4):
        planted = Planted(seed)
        server.series = planted.series
        api = PrometheusAPI(f"http://127.0.0.1:{server.server_port}", patience_s=0)
        report = fleet_report(collect_fleet(api, START_S, START_S + HOURS * HOUR_S, step_s=STEP_S))
        api.close()
        hold_against(report, planted, seed)


def hold_against(report: FleetReport, planted: Planted, seed: int) -> None:
    jobs = {job.figures.job: job for job in report.jobs}
    assert set(jobs) == {run.name for run in planted.runs}, seed
    for run in planted.runs:
        job, where = jobs[run.name], (seed, run.name)
        assert job.gpus == run.gpus, where
        assert {device.device.uuid for device in job.figures.devices} == set(run.samples), where
        assert len(job.figures.devices) == len(run.samples), where
        assert job.figures.samples == sum(map(len, run.samples.values())), where
        assert job.figures.ofu is not None
        assert job.figures.ofu.mean == pytest.approx(run.mean, rel=1e-9), where
        for device in job.figures.devices:
            true = mean_of(run.samples[str(device.device.uuid)])
            assert device.ofu == pytest.approx(true, rel=1e-9), where
        assert len(job.figures.drops) == run.fell, where
        assert job.figures.odd_devices == (), where
        # Of some thirty samples of a GPU at least, whose clock is uneven; after a fall it would be 0.67.
        assert (job.figures.imbalance or 0) < 0.1, where
    everything = [one for run in planted.runs for of_gpu in run.samples.values() for one in of_gpu]
    assert report.ofu_mean == pytest.approx(mean_of(everything), rel=1e-9), seed
    assert report.devices == len({gpu for run in planted.runs for gpu in run.samples}), seed
    assert report.device_hours == pytest.approx(sum(seconds for _, seconds in everything) / 3600), seed
    told = [note for note in report.notes if note.startswith(f"{planted.refused} samples of")]
    assert bool(told) is bool(planted.refused), (seed, report.notes)
    assert all("above the 2000 MHz that NVIDIA H100 80GB HBM3 reaches" in note for note in told), seed
