"""A small fleet that a real Prometheus scrapes each second, with the rules in it."""

from __future__ import annotations

import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perf_metrics import GoodputLogger, PrometheusExporter

from .prometheus_server import PrometheusServer
from .promtool_rules import CLOCK, H100, OLD

_PATIENCE_S = 30.0


def ask(server: PrometheusServer, path: str, **parameters: object) -> Any:
    """Return the data of an answer of the HTTP API."""
    with urllib.request.urlopen(
        f"{server.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10
    ) as answer:
        return json.load(answer)["data"]


def values(server: PrometheusServer, expression: str) -> dict[str, str]:
    """Return what an expression gives now, as Prometheus writes it, by job."""
    result = ask(server, "query", query=expression)["result"]
    return {series["metric"].get("hpc_job", ""): series["value"][1] for series in result}


def wait_for(server: PrometheusServer, expression: str, expected: Mapping[str, str]) -> None:
    """Wait until an expression has these values by job; fail with the last ones if it never has."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := values(server, expression)) != expected:
        assert time.monotonic() < deadline, f"{expression} is {found}; the log:\n{server.log[-2000:]}"
        time.sleep(0.2)


def exporting(
    job: str, goodput: GoodputLogger | None = None, **record: object
) -> tuple[PrometheusExporter, SimpleNamespace]:
    """Begin to export a record of a job."""
    exporter = PrometheusExporter(port=0, labels={"hpc_job": job}, goodput=goodput)
    state = SimpleNamespace(global_step=10, is_world_process_zero=True)
    exporter.on_train_begin(None, state, None)
    exporter.on_log(None, state, None, logs=record)
    return exporter, state


@contextmanager
def counters() -> Iterator[int]:
    """Serve the counters of two nodes as dcgm-exporter writes them; jobs a and b, and an idle GPU."""
    lines = []
    for index, (job, activity, mhz) in enumerate(
        [("a", 0.5, 915), ("a", 0.25, 1830), ("b", 0.75, 1830), (None, 0, 345)]
    ):
        labels = {
            "gpu": str(index % 2),
            "UUID": f"GPU-{index}",
            "modelName": H100,
            "Hostname": f"node{index // 2}",
        }
        told = {**labels, **({} if job is None else {"hpc_job": job})}
        text = ",".join(f'{name}="{value}"' for name, value in told.items())
        lines += [f"{OLD}{{{text}}} {activity}", f"{CLOCK}{{{text}}} {mhz}"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(("\n".join(lines) + "\n").encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def steps(folder: Path) -> Iterator[GoodputLogger]:
    """Do steps of a twentieth of a second, with as much waiting for data, until the end."""
    goodput, over = GoodputLogger(), threading.Event()
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    goodput.on_train_begin(SimpleNamespace(output_dir=str(folder)), state, None)

    def run() -> None:
        while not over.wait(0.05):
            goodput.on_step_begin(None, state, None)
            over.wait(0.05)
            state.global_step += 1
            goodput.on_step_end(None, state, None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield goodput
    finally:
        over.set()
        thread.join()
        goodput.on_train_end(None, state, None)


@contextmanager
def live_fleet(
    folder: Path, rules: str, external: Mapping[str, str] | None = None
) -> Iterator[PrometheusServer]:
    """Run a server with these rules; jobs a (with an MFU of 0.5) and b (without), and `external` labels."""
    (folder / "rules.yml").write_text(rules)
    with ExitStack() as stack:
        goodput = stack.enter_context(steps(folder / "run"))
        exporter, state = exporting("a", goodput, loss=1.0, mfu=0.5)
        stack.callback(exporter.on_train_end, None, state, None)
        targets = [f"127.0.0.1:{port}" for port in (stack.enter_context(counters()), exporter.port)]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [
                {"job_name": "fleet", "static_configs": [{"targets": targets, "labels": external or {}}]}
            ],
        }
        yield stack.enter_context(PrometheusServer(folder / "prometheus", json.dumps(config)))
