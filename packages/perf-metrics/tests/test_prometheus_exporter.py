"""The endpoint over real HTTP, read as Prometheus reads it."""

from __future__ import annotations

import math
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perf_metrics import GoodputLogger, PrometheusExporter
from perf_metrics.callbacks.prometheus_endpoint import MOST_CONNECTIONS, MetricsEndpoint
from perf_metrics.monitoring.series import STEP

RECORD = {
    "loss": 2.5,
    "grad_norm": 0.75,
    "learning_rate": 3e-4,
    "tok_per_sec": 1000.0,
    "input_tokens": 4096,
    "mfu": 0.42,
    "hfu": 0.5,
    "ofu": 0.44,
    "ofu_per_rank": [0.44],
    "peak_mem_allocated": [1_000, 3_000, 2_000],
}


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(port=0)
    yield exporter
    exporter.on_train_end(None, None, None)


def scrape(exporter: PrometheusExporter | MetricsEndpoint) -> dict[str, float]:
    """What it serves, by name."""
    return {sample.name: sample.value for sample in samples(exporter)}


def samples(exporter: PrometheusExporter | MetricsEndpoint) -> list:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples]


def log(run, exporter: PrometheusExporter, step: int, **record: object) -> None:
    run.state.global_step = step
    run.fire("on_log", exporter, logs=record)


def test_a_record_is_served_under_the_names_and_units_of_prometheus(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    before = time.time()
    log(run, exporter, 10, **RECORD)
    served = scrape(exporter)
    assert before <= served.pop("training_last_record_timestamp_seconds") <= time.time()
    assert served == {
        "training_step": 10,
        "training_loss": 2.5,
        "training_grad_norm": 0.75,
        "training_learning_rate": 3e-4,
        "training_tokens_per_second": 1000.0,
        "training_tokens_total": 4096,
        "training_mfu_ratio": 0.42,
        "training_hfu_ratio": 0.5,
        "training_ofu_ratio": 0.44,
        "training_peak_memory_bytes": 3_000,
    }


def test_what_device_time_is_spent_on_is_served_by_kind(run, tmp_path) -> None:
    goodput = GoodputLogger()
    exporter = PrometheusExporter(port=0, labels={"hpc_job": "4711"}, goodput=goodput)
    run.args.output_dir = str(tmp_path)
    run.fire("on_train_begin", goodput, exporter)
    try:
        for _ in range(3):
            run.fire("on_step_begin", goodput)
            time.sleep(0.05)
            run.fire("on_step_end", goodput)
        # At the time of the scrape, not of the last record: there is none yet.
        served = {
            sample.labels["kind"]: sample.value
            for sample in samples(exporter)
            if sample.name == "training_device_seconds_total"
        }
        assert served == pytest.approx(goodput.device_seconds())
        assert served["steps"] >= 0.15
        assert served["start"] > 0
        assert served["saving"] == 0  # from the beginning, so that its first value is growth
    finally:
        run.fire("on_train_end", goodput, exporter)
    assert goodput.device_seconds() == {}


def test_a_goodput_logger_that_was_not_given_to_the_trainer_is_told_once(run, caplog) -> None:
    exporter = PrometheusExporter(port=0, goodput=GoodputLogger())
    run.fire("on_train_begin", exporter)
    try:
        for step in (1, 2):
            log(run, exporter, step, loss=1.0)
    finally:
        run.fire("on_train_end", exporter)
    assert caplog.text.count("is not among the callbacks of this training") == 1


def test_a_goodput_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="goodput=5 must be a GoodputLogger"):
        PrometheusExporter(goodput=5)


def test_a_label_that_goodput_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="must not have kind"):
        PrometheusExporter(labels={"kind": "x"}, goodput=GoodputLogger())


def test_the_kinds_and_texts_are_told(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 10, **RECORD)
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert "# TYPE training_tokens_total counter" in lines
    assert "# TYPE training_mfu_ratio gauge" in lines
    helped = {line.split()[2] for line in lines if line.startswith("# HELP")}
    assert {line.split()[0] for line in lines if not line.startswith("#")} == helped


def test_from_the_beginning_there_is_a_position_and_no_figure(run, exporter) -> None:
    run.state.global_step = 500
    run.fire("on_train_begin", exporter)
    assert scrape(exporter) == {"training_step": 500, "training_tokens_total": 0}


def test_tokens_add_up_over_records_and_begin_anew_with_a_training(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    for step in (1, 2, 3):
        log(run, exporter, step, loss=1.0, input_tokens=100)
    assert scrape(exporter)["training_tokens_total"] == 300
    run.fire("on_train_end", exporter)
    run.fire("on_train_begin", exporter)
    assert scrape(exporter) == {"training_step": 3, "training_tokens_total": 0}


@pytest.mark.parametrize("unknown", [{"mfu": None}, {}, {"mfu": [0.1, 0.2]}, {"mfu": "high"}])
def test_what_a_record_does_not_know_is_not_served_with_its_old_value(run, exporter, unknown) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, loss=1.0, mfu=0.4)
    assert scrape(exporter)["training_mfu_ratio"] == 0.4
    log(run, exporter, 2, loss=0.9, **unknown)
    served = scrape(exporter)
    assert "training_mfu_ratio" not in served
    assert served["training_loss"] == 0.9
    log(run, exporter, 3, loss=0.8, mfu=0.3)
    assert scrape(exporter)["training_mfu_ratio"] == 0.3


def test_not_a_number_stays_that(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, loss=math.nan, grad_norm=math.inf)
    served = scrape(exporter)
    assert math.isnan(served["training_loss"])
    assert served["training_grad_norm"] == math.inf


def test_values_in_arrays_are_values(run, exporter) -> None:
    import torch

    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, loss=torch.tensor(2.5), peak_mem_allocated=[torch.tensor(7), 5])
    served = scrape(exporter)
    assert (served["training_loss"], served["training_peak_memory_bytes"]) == (2.5, 7)


def test_memory_that_one_rank_does_not_know_is_not_served(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, loss=1.0, peak_mem_allocated=[5, None])
    assert "training_peak_memory_bytes" not in scrape(exporter)


def test_an_evaluation_adds_its_loss_and_leaves_the_interval(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 10, **RECORD)
    log(run, exporter, 10, epoch=0.5, eval_loss=2.25, eval_tokens=64)
    interval = scrape(exporter)
    assert interval["training_evaluation_loss"] == 2.25
    assert interval["training_mfu_ratio"] == 0.42
    log(run, exporter, 20, loss=2.0)
    assert scrape(exporter)["training_evaluation_loss"] == 2.25


def test_the_final_metrics_do_not_pass_for_an_interval(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 10, **RECORD)
    before = scrape(exporter)
    log(run, exporter, 10, train_runtime=3.5, mfu=0.1, input_tokens=5)
    assert scrape(exporter) == before


def test_labels_are_on_every_series(run) -> None:
    labels = {"hpc_job": "4711", "cluster": 'a "b" \\c\n'}
    exporter = PrometheusExporter(port=0, labels=labels)
    run.fire("on_train_begin", exporter)
    log(run, exporter, 10, **RECORD)
    log(run, exporter, 10, eval_loss=1.0)
    told = samples(exporter)
    run.fire("on_train_end", exporter)
    assert len(told) == 12
    assert [sample.labels for sample in told] == [labels] * 12


def test_only_world_rank_zero_listens(run, exporter) -> None:
    run.state.is_world_process_zero = False
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, **RECORD)
    assert exporter.port is None


def test_the_port_is_free_after_the_training_and_taken_again_by_the_next(run) -> None:
    first = PrometheusExporter(port=0)
    run.fire("on_train_begin", first)
    port = first.port
    run.fire("on_train_end", first)
    assert first.port is None
    exporter = PrometheusExporter(port=port)
    for step in (1, 2):
        run.fire("on_train_begin", exporter)
        log(run, exporter, step, loss=1.0)
        assert scrape(exporter)["training_step"] == step
        run.fire("on_train_end", exporter)
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_training_that_broke_off_does_not_keep_the_port_from_the_next(run) -> None:
    probe = PrometheusExporter(port=0)
    run.fire("on_train_begin", probe)
    exporter = PrometheusExporter(port=probe.port)
    run.fire("on_train_end", probe)
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, **RECORD)
    run.fire("on_train_begin", exporter)
    assert scrape(exporter) == {"training_step": 1, "training_tokens_total": 0}
    run.fire("on_train_end", exporter)


def test_it_stops_listening_when_an_exception_ends_the_training(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    log(run, exporter, 1, **RECORD)
    port = exporter.port
    run.fire("on_exception", exporter, exception=RuntimeError("ended"))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    another = PrometheusExporter(port=port)
    run.fire("on_train_begin", another)
    assert scrape(another) == {"training_step": 1, "training_tokens_total": 0}
    run.fire("on_train_end", another)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_processes_forked_meanwhile_do_not_keep_the_port(run, exporter) -> None:
    """As workers of a data loader that stay on."""
    run.fire("on_train_begin", exporter)
    port = exporter.port
    context = multiprocessing.get_context("fork")
    leave = context.Event()
    worker = context.Process(target=leave.wait)
    worker.start()
    try:
        run.fire("on_train_end", exporter)
        again = PrometheusExporter(port=port)
        run.fire("on_train_begin", again)
        assert scrape(again)["training_step"] == 0
        run.fire("on_train_end", again)
        assert worker.is_alive()
    finally:
        leave.set()
        worker.join()


def test_a_port_that_is_taken_is_named(run, exporter) -> None:
    run.fire("on_train_begin", exporter)
    second = PrometheusExporter(port=exporter.port)
    with pytest.raises(OSError, match=rf"port={exporter.port}, host='127.0.0.1' .*in use.*port=0"):
        run.fire("on_train_begin", second)
    assert second.port is None


def test_an_address_of_another_machine_is_named(run) -> None:
    with pytest.raises(OSError, match=r"host='192\.0\.2\.1' is not an address where the exporter can listen"):
        run.fire("on_train_begin", PrometheusExporter(port=0, host="192.0.2.1"))


@pytest.mark.parametrize("port", [-1, 65536, 9401.5, "9401", True])
def test_a_port_out_of_range_is_named(port: object) -> None:
    with pytest.raises(ValueError, match=rf"port={port!r} must be a whole number from 0 to 65535"):
        PrometheusExporter(port=port)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hpc-job", "9lives", "", "__name__", "job name", "größe"])
def test_labels_that_prometheus_would_refuse_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"labels=.* has '{name}', which is not the name of a label"):
        PrometheusExporter(labels={name: "x"})


def test_values_of_labels_are_text_and_not_empty() -> None:
    with pytest.raises(TypeError, match=r"labels=\{'hpc_job': 7\} must have text as hpc_job"):
        PrometheusExporter(labels={"hpc_job": 7})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"labels=\{'hpc_job': ''\} must not have an empty hpc_job"):
        PrometheusExporter(labels={"hpc_job": ""})


def test_without_the_library_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['prometheus_client'] = None; import perf_metrics\n"
        "try: perf_metrics.PrometheusExporter()\nexcept ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'perf-metrics[prometheus]'" in done.stdout


def test_the_import_of_the_package_does_not_load_the_library() -> None:
    script = "import sys, perf_metrics; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def ended(connection: socket.socket) -> bool:
    """Whether the other side ends this connection within five seconds."""
    connection.settimeout(5)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def dribble(connection: socket.socket, seconds: float) -> None:
    """Send a header letter by letter."""
    connection.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            connection.sendall(b"a")
            time.sleep(0.05)
    except ConnectionError:
        return


def test_silent_and_slow_connections_are_dropped_in_time() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", 0, {}, patience_s=0.4)
    address = ("127.0.0.1", endpoint.port)
    with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
        dribble(slow, 1.0)
        assert ended(slow)
        assert ended(silent)
    endpoint.close()


def test_a_crowd_of_silent_connections_keeps_neither_a_scrape_nor_threads() -> None:
    # So long that none is dropped because its time has run out.
    endpoint = MetricsEndpoint("127.0.0.1", 0, {}, patience_s=3600)
    endpoint.tell({STEP: 7})
    before = threading.active_count()
    crowd = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(4 * MOST_CONNECTIONS)]
    assert scrape(endpoint) == {"training_step": 7}
    # The thread of a connection that was dropped ends a moment after it, on a busy machine a long one.
    deadline = time.monotonic() + 30
    while threading.active_count() - before > MOST_CONNECTIONS and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() - before <= MOST_CONNECTIONS
    assert all(ended(connection) for connection in crowd[: 3 * MOST_CONNECTIONS]), "the oldest"
    endpoint.close()
    assert all(ended(connection) for connection in crowd)
    for connection in crowd:
        connection.close()
