"""A real Prometheus scrapes the exporter of a training, each second."""

from __future__ import annotations

import json
from collections.abc import Callable

from .live_fleet import ask, exporting, wait_for
from .prometheus_server import PrometheusServer


def test_figures_come_and_go_in_the_database_as_in_the_records(
    prometheus_server: Callable[..., PrometheusServer],
) -> None:
    exporter, state = exporting("4711", loss=2.5, mfu=0.42, input_tokens=4096)
    config = {
        "scrape_configs": [
            {
                "job_name": "training",
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}],
            }
        ]
    }
    try:
        with prometheus_server(json.dumps(config)) as server:
            wait_for(server, "training_mfu_ratio", {"4711": "0.42"})
            wait_for(server, "training_tokens_total", {"4711": "4096"})
            wait_for(server, "training_step", {"4711": "10"})
            kinds = ask(server, "metadata")
            # As OpenMetrics calls the family of a counter.
            assert kinds["training_tokens"][0]["type"] == "counter"
            assert kinds["training_mfu_ratio"][0]["type"] == "gauge"
            state.global_step = 20
            exporter.on_log(None, state, None, logs={"loss": float("nan"), "mfu": None, "input_tokens": 4096})
            wait_for(server, "training_step", {"4711": "20"})
            wait_for(server, "training_tokens_total", {"4711": "8192"})
            wait_for(server, "training_loss", {"4711": "NaN"})
            # At once, and not after the five minutes for which Prometheus continues with an old value.
            wait_for(server, "training_mfu_ratio", {})
            exporter.on_train_end(None, state, None)
            wait_for(server, "up", {"": "0"})
            wait_for(server, "training_step", {})
    finally:
        exporter.on_train_end(None, state, None)
