"""What becomes of answers that a healthy server never gives, from a server that is told what to answer."""

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from perf_metrics import PrometheusAPI, PrometheusError, collect_fleet, fleet_report
from perf_metrics.fleet.prometheus_api import QueryTooLargeError, read_in_chunks
from perf_metrics.ofu.counter_files import CLOCK_NAME

WHOLE = {
    "status": "success",
    "data": {
        "resultType": "matrix",
        "result": [{"metric": {"__name__": "up"}, "values": [[0, "1"]]}],
    },
}


class Server(ThreadingHTTPServer):
    """Gives the prepared answers one after another, the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, bytes, int]] = []
        self.asked: list[dict[str, list[str]]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}

    def answer(self, body: object, status: int = 200, cut: int = 0) -> None:
        """Prepare an answer that lacks its last bytes."""
        self.answers.append((status, body if isinstance(body, bytes) else json.dumps(body).encode(), cut))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append(parse_qs(form))
        self.server.headers_seen.append(dict(self.headers))
        answers = self.server.answers
        status, body, cut = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for header in self.server.headers.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body[: len(body) - cut])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def api(server: Server, said: list[str]) -> Iterator[PrometheusAPI]:
    api = PrometheusAPI(server.url + "/", patience_s=2, say=said.append, headers={"X-Scope-OrgID": "team"})
    yield api
    api.close()


def test_a_whole_answer(server: Server, api: PrometheusAPI, said: list[str]) -> None:
    server.answer(WHOLE)
    (series,) = api.query_range("up", 0, 60, 30)
    assert (series.labels, series.points) == ({"__name__": "up"}, [[0, "1"]])
    assert server.asked == [{"query": ["up"], "start": ["0.000"], "end": ["60.000"], "step": ["30"]}]
    assert server.headers_seen[0]["X-Scope-OrgID"] == "team"
    assert said == []


@pytest.mark.parametrize(
    ("body", "status", "cut"),
    [(WHOLE, 200, 5), (b"Service Unavailable", 503, 0), (b"", 429, 0), (b"{", 502, 0)],
)
def test_a_server_that_cannot_answer_now_is_asked_again(
    server: Server, api: PrometheusAPI, said: list[str], body: object, status: int, cut: int
) -> None:
    server.answer(body, status, cut)
    server.answer(WHOLE)
    assert len(api.query_range("up", 0, 60, 30)) == 1
    assert len(said) == 2
    assert said[0].startswith(f"{server.url} gives no answer (")
    assert said[1] == f"{server.url} answers again"


def test_patience_ends_in_an_error_that_says_there_is_no_report(server: Server, api: PrometheusAPI) -> None:
    server.answer(b"", 503)
    with pytest.raises(PrometheusError, match=r"no answer for \d s \(status 503\).*no report"):
        api.query_range("up", 0, 60, 30)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (WHOLE | {"warnings": ["a store is down"]}, 200, r"may not be whole: \['a store is down'\]"),
        (WHOLE | {"isPartial": True}, 200, "may not be whole: isPartial"),
        ({"status": "success", "data": {"resultType": "matrix", "result": None}}, 200, "as Prometheus does"),
        ({"status": "error", "error": None}, 400, "refuses the query 'up': it says no more"),
        ({"status": "error", "error": "parse error: x"}, 400, "refuses the query 'up': parse error: x"),
        (b"<html>Not here</html>", 404, "status 404 and no JSON .* Is it a Prometheus server"),
        (b"<html>Welcome</html>", 200, "status 200 and no JSON .* Is it a Prometheus server"),
        (b"no", 401, "status 401. Give --bearer-token-file"),
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, 200, "as Prometheus does"),
        ([], 200, "as Prometheus does"),
    ],
)
def test_an_answer_that_cannot_be_used_ends_it_at_once(
    server: Server, api: PrometheusAPI, said: list[str], body: object, status: int, message: str
) -> None:
    server.answer(body, status)
    with pytest.raises(PrometheusError, match=message):
        api.query_range("up", 0, 60, 30)
    assert (len(server.asked), said) == (1, [])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"status": "error", "error": "query processing would load too many samples"}, 422),
        ({"status": "error", "error": "the query exceeded the maximum number of chunks"}, 422),
        ({"status": "error", "errorType": "timeout", "error": "query timed out"}, 503),
        (b"Request Entity Too Large", 413),
    ],
)
def test_what_is_too_large_for_a_server_is_told_apart(
    server: Server, api: PrometheusAPI, body: object, status: int
) -> None:
    server.answer(body, status)
    with pytest.raises(QueryTooLargeError):
        api.query_range("up", 0, 60, 30)


def test_a_redirect_is_told_and_not_followed(server: Server, api: PrometheusAPI) -> None:
    server.answer(b"", 302)
    with pytest.raises(
        PrometheusError, match=r"redirects to another address\. Give the address that answers"
    ):
        api.query_range("up", 0, 60, 30)


def test_a_password_in_the_address_is_used_and_never_shown(server: Server, said: list[str]) -> None:
    server.answer(b"", 503)
    server.answer(WHOLE)
    api = PrometheusAPI(server.url.replace("//", "//me:secret@"), patience_s=2, say=said.append)
    api.query_range("up", 0, 60, 30)
    assert server.headers_seen[-1]["Authorization"].startswith("Basic ")
    assert said
    assert "secret" not in "".join([*said, api.url])


def test_an_answer_too_large_for_the_server_is_asked_for_in_parts() -> None:
    asked: list[tuple[float, float]] = []

    def read(first: float, last: float) -> int:
        if last - first > 300:
            raise QueryTooLargeError("query processing would load too many samples into memory")
        asked.append((first, last))
        return 100_000

    read_in_chunks(read, 1000, 4000, 30, lambda seconds: None)
    times = [time for first, last in asked for time in range(int(first), int(last) + 1, 30)]
    assert times == list(range(1000, 4001, 30))

    with pytest.raises(QueryTooLargeError):
        read_in_chunks(lambda first, last: read(0, 1e6), 1000, 4000, 30, lambda seconds: None)


def test_settings_are_checked_before_the_server_is_asked(server: Server, api: PrometheusAPI) -> None:
    with pytest.raises(ValueError, match="must be before end="):
        collect_fleet(api, 60, 0)
    with pytest.raises(ValueError, match="step_s=0 must be 1 to 3600"):
        collect_fleet(api, 0, 60, step_s=0)
    with pytest.raises(ValueError, match="job_label='hpc-job' is not the name of a label"):
        collect_fleet(api, 0, 60, job_labels=["hpc-job"])
    for wrong in ("localhost:9090", "http://", "http://host:abc", "http://[::1"):
        with pytest.raises(ValueError, match=r"prometheus=.*(must be|is not an) a"):
            PrometheusAPI(wrong)
    with pytest.raises(ValueError, match="patience_s=nan"):
        PrometheusAPI(server.url, patience_s=float("nan"))
    assert server.asked == []


def test_a_fleet_without_the_series_says_what_to_look_at(server: Server, api: PrometheusAPI) -> None:
    server.answer({"status": "success", "data": {"resultType": "matrix", "result": []}})
    fleet = collect_fleet(api, 0, 60)
    assert not fleet.jobs
    assert "with the label hpc_job: does dcgm-exporter export it" in fleet.notes[0]


@contextmanager
def line(speak: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server that does with each connection what it is told; yields its address."""
    done = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not done.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                with suppress(OSError):
                    speak(connection, done)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            done.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 ",
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(WHOLE).encode(),
    ],
    ids=["in the status", "in the header", "in the body", "after the body"],
)
def test_one_byte_after_another_holds_nobody_longer_than_the_deadline(start: bytes, said: list[str]) -> None:
    def dribble(connection: socket.socket, done: threading.Event) -> None:
        connection.sendall(start)
        while not done.wait(0.02):
            connection.sendall(b" ")

    with line(dribble) as url:
        api = PrometheusAPI(url, patience_s=0.2, timeout_s=0.4, say=said.append)
        began = time.monotonic()
        with pytest.raises(PrometheusError, match=r"the answer was not whole after 0\.4 s"):
            api.query_range("up", 0, 60, 30)
        assert time.monotonic() - began < 30  # it would be held for ever
        api.close()


def test_a_line_that_falls_silent_is_late_whichever_clock_notices(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the whole answer is a thread, which an overloaded host may run too late."""
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda _, cut: timer(60, cut))

    def fall_silent(connection: socket.socket, done: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n ")
        done.wait()

    with line(fall_silent) as url:
        api = PrometheusAPI(url, patience_s=0.2, timeout_s=0.4, say=said.append)
        with pytest.raises(PrometheusError, match=r"the answer was not whole after 0\.4 s"):
            api.query_range("up", 0, 60, 30)
        api.close()


def test_an_answer_without_an_end_is_cut_at_its_limit() -> None:
    sent = 0

    def pour(connection: socket.socket, done: threading.Event) -> None:
        nonlocal sent
        sent = 0
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not done.is_set():
            sent += connection.send(b"[" * 65536)

    with line(pour) as url:
        api = PrometheusAPI(url, patience_s=0, most_bytes=1_000_000)
        with pytest.raises(QueryTooLargeError, match=r"more than 1,000,000 bytes.*--selector"):
            api.query_range("up", 0, 60, 30)
        # What lies in buffers of the system in between is not read.
        assert sent < 20_000_000
        api.close()


def test_a_packed_answer_counts_as_what_it_unpacks_to(server: Server) -> None:
    api = PrometheusAPI(server.url, patience_s=0, most_bytes=1_000_000)
    server.headers = {"Content-Encoding": "gzip"}
    server.answer(gzip.compress(json.dumps(WHOLE).encode()))
    assert len(api.query_range("up", 0, 60, 30)) == 1
    server.answers = []
    server.answer(gzip.compress(b" " * 2_000_000))
    with pytest.raises(QueryTooLargeError):
        api.query_range("up", 0, 60, 30)
    server.headers = {"Content-Encoding": "br"}
    with pytest.raises(PrometheusError, match="in the encoding 'br', and gzip was asked for"):
        api.query_range("up", 0, 60, 30)
    api.close()


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\xff"}'], ids=["deep", "huge", "bytes"]
)
def test_what_no_parser_reads_is_named(server: Server, api: PrometheusAPI, body: bytes) -> None:
    server.answer(body)
    with pytest.raises(PrometheusError, match="status 200 and no JSON"):
        api.query_range("up", 0, 60, 30)


NAME = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
GPU = {"UUID": "GPU-1", "gpu": "0", "Hostname": "node", "modelName": "NVIDIA H100 80GB HBM3", "hpc_job": "a"}


@pytest.mark.parametrize(
    ("series", "wrong"),
    [
        ("x", "a series is not an object"),
        ({"metric": {"hpc_job": 7}, "values": []}, "its labels are not texts"),
        ({"metric": ["a"], "values": []}, "its labels are not texts"),
        ({"metric": {}, "histograms": []}, "it has no list of values"),
        ({"metric": {}, "values": [[0]]}, "a point is not a pair of time and value"),
        ({"metric": {}, "values": [0, "1"]}, "a point is not a pair of time and value"),
        ({"metric": {}, "values": [[True, "1"]]}, "a time is not within"),
        ({"metric": {}, "values": [[10**400, "1"]]}, "a time is not within"),
        ({"metric": {}, "values": [[1e9, "1"]]}, "a time is not within"),
        ({"metric": {}, "values": [[float("nan"), "1"]]}, "a time is not within"),
        ({"metric": {}, "values": [["0", "1"]]}, "a time is not within"),
        ({"metric": {}, "values": [[0, 1.0]]}, "a value is not the text of a number"),
        ({"metric": {}, "values": [[0, "much"]]}, "a value is not the text of a number"),
        ({"metric": {}, "values": [[0, "1_0"]]}, "a value is not the text of a number"),
        ({"metric": {}, "values": [[30, "1"], [0, "1"]]}, "its times do not ascend"),
        ({"metric": {}, "values": [[30, "1"], [30, "1"]]}, "its times do not ascend"),
        ({"metric": {**GPU, "__name__": "up"}, "values": [[0, "0.5"]]}, "not the name or the labels"),
        ({"metric": GPU, "values": [[0, "0.5"]]}, "not the name or the labels"),
        ({"metric": {**GPU, "__name__": NAME, "hpc_job": ""}, "values": []}, "not the name or the labels"),
    ],
)
def test_a_malformed_series_is_refused_and_counted(
    server: Server, api: PrometheusAPI, series: object, wrong: str
) -> None:
    def result(*many: object) -> dict[str, object]:
        return {"status": "success", "data": {"resultType": "matrix", "result": [*many]}}

    whole = [
        {"metric": {**GPU, "__name__": name}, "values": [[0, value], [30, "NaN"]]}
        for name, value in ((NAME, "0.5"), (CLOCK_NAME, "1830"))
    ]
    server.answer(result(whole[0], series))
    server.answer(result(whole[1]))
    fleet = collect_fleet(api, 0, 60)
    (note,) = [one for one in fleet.notes if "malformed" in one]
    assert note.startswith("1 series of the server's answers are malformed and left out: ")
    assert wrong in note
    report = fleet_report(fleet)
    assert [(job.figures.job, job.figures.samples) for job in report.jobs] == [("a", 1)]
    assert report.ofu_mean == 0.5


def test_wrong_values_are_one_note_of_each_kind(server: Server, api: PrometheusAPI) -> None:
    """Each was a note of its own with its number: thousands of them for an exporter in percent."""

    def result(name: str, *values: float) -> dict[str, object]:
        points = [[30 * place, repr(value)] for place, value in enumerate(values)]
        series = {"metric": {**GPU, "__name__": name}, "values": points}
        return {"status": "success", "data": {"resultType": "matrix", "result": [series]}}

    server.answer(result(NAME, 45.5, 46.5, -1.0, -2.0, 0.5))
    server.answer(result(CLOCK_NAME, *[1830.0] * 5))
    notes = fleet_report(collect_fleet(api, 0, 120)).notes
    assert len(notes) == 2
    assert notes[0] == f"{NAME}: 2 of 5 points are blank (no value)"
    assert notes[1].startswith("3 samples of 1 jobs have a tensor activity above 1")
