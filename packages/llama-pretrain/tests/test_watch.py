"""The command `watch`: what it reads of a run, to whom it answers, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_pretrain.cli import main
from llama_pretrain.commands.watch import JsonLines, Server, Watcher
from perf_metrics import JsonLogger

from .browser import Browser, Page, find_chromium


class Log:
    """A log as a training writes it, with the real callback."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._args = SimpleNamespace(output_dir=str(directory), logging_dir=None)
        self._state = SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0.0, max_steps=99)
        self._logger = JsonLogger()

    def begin(self, step: int = 0) -> None:
        self._state.global_step = step
        self._logger.on_train_begin(self._args, self._state, None)  # type: ignore[arg-type]

    def write(self, step: int, **record: object) -> None:
        self._state.global_step = step
        logs = record or {"loss": 5.0 - step / 100, "learning_rate": 1e-3}
        self._logger.on_log(self._args, self._state, None, logs=logs)  # type: ignore[arg-type]

    @property
    def path(self) -> Path:
        return self.directory / "trainer_logs.json"


def steps(lines: JsonLines) -> list[object]:
    return [entry["global_step"] for entry in lines.items]


@pytest.fixture
def lines() -> JsonLines:
    return JsonLines(lambda entry: entry)


def test_a_log_is_read_as_it_grows(tmp_path: Path, lines: JsonLines) -> None:
    log = Log(tmp_path)
    lines.refresh(log.path)
    assert (lines.items, lines.generation) == ([], 1)
    log.begin()
    for step in range(1, 30):
        log.write(step)
        lines.refresh(log.path)
        assert steps(lines) == list(range(1, step + 1))
    assert lines.generation == 1
    assert lines.since(1, 27)["items"] == lines.items[27:]
    assert lines.since(0, 27) == {"generation": 1, "first": 0, "items": lines.items}
    assert lines.since(1, 30)["first"] == 0  # more than there is


def test_only_what_was_appended_is_read(tmp_path: Path, lines: JsonLines) -> None:
    log = Log(tmp_path)
    log.begin()
    for step in range(1, 2000):
        log.write(step)
    lines.refresh(log.path)
    log.write(2000)
    parsed: list[object] = []
    lines._keep = lambda entry: parsed.append(entry) or entry  # type: ignore[func-returns-value]
    lines.refresh(log.path)
    assert (len(parsed), len(lines.items)) == (1, 2000)


def test_a_line_that_is_half_written_comes_whole_later(tmp_path: Path, lines: JsonLines) -> None:
    path = tmp_path / "samples.jsonl"
    first, second = b'{"global_step": 1}\n', b'{"global_step": 2, "text": "\xc3\xa9"}\n'
    for end in range(len(second)):
        path.write_bytes(first + second[:end])
        lines.refresh(path)
        assert steps(lines) == [1]
    path.write_bytes(first + second)
    lines.refresh(path)
    assert steps(lines) == [1, 2]
    assert lines.generation == 1


def test_a_damaged_line_is_left_out(tmp_path: Path, lines: JsonLines) -> None:
    path = tmp_path / "trainer_logs.json"
    path.write_bytes(b'[\n{"global_step": 1},\n{"global_st\n')
    lines.refresh(path)
    assert steps(lines) == [1]
    path.write_bytes(b'[\n{"global_step": 1},\n{"global_st\n{"global_step": 3}\n]\n')
    lines.refresh(path)
    assert steps(lines) == [1, 3]


def test_a_resume_to_an_earlier_step_begins_anew(tmp_path: Path, lines: JsonLines) -> None:
    log = Log(tmp_path)
    log.begin()
    for step in range(1, 21):
        log.write(step)
    lines.refresh(log.path)
    log.begin(10)  # drops what came after the checkpoint
    lines.refresh(log.path)
    assert (steps(lines), lines.generation) == (list(range(1, 11)), 2)
    log.write(11, loss=1.0)
    lines.refresh(log.path)
    assert (steps(lines), lines.generation) == (list(range(1, 12)), 2)


def test_a_resume_between_two_looks_is_not_missed(tmp_path: Path, lines: JsonLines) -> None:
    """The file is as long as before, or longer, and its beginning is the same."""
    log = Log(tmp_path)
    log.begin()
    for step in range(1, 11):
        log.write(step)
    lines.refresh(log.path)
    log.begin(5)
    for step in range(6, 15):
        log.write(step, loss=1.0, learning_rate=1e-3)
    lines.refresh(log.path)
    assert steps(lines) == list(range(1, 15))
    assert [entry["loss"] for entry in lines.items[5:]] == [1.0] * 9
    assert lines.generation == 2


def test_a_run_that_is_removed_is_forgotten(tmp_path: Path, lines: JsonLines) -> None:
    log = Log(tmp_path / "run")
    log.begin()
    log.write(1)
    lines.refresh(log.path)
    shutil.rmtree(log.directory)
    lines.refresh(log.path)
    lines.refresh(log.path)
    assert (lines.items, lines.generation) == ([], 2)
    log.begin()
    log.write(7)
    lines.refresh(log.path)
    assert steps(lines) == [7]


def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path, lines: JsonLines) -> None:
    os.mkfifo(tmp_path / "trainer_logs.json")
    lines.refresh(tmp_path / "trainer_logs.json")
    lines.refresh(tmp_path)
    assert lines.items == []


def news_of(*runs: Path) -> list[dict[str, Any]]:
    news: Any = Watcher([str(run) for run in runs]).news([])
    return list(news["runs"])


def test_states_and_events_come_from_the_history_of_the_run(tmp_path: Path) -> None:
    assert news_of(tmp_path / "none")[0]["state"] == "waiting"
    log = Log(tmp_path / "run")
    log.begin()
    log.write(3, loss=float("nan"), peak_mem_allocated=[5, 7], eval_note="text")
    sessions: list[dict[str, object]] = [
        {"started": "2026-01-01T10:00:00+00:00", "device": "cpu", "first_step": 0},
        {"started": "2026-01-01T11:00:00+00:00", "device": "cpu", "first_step": 50},
    ]
    (log.directory / "sessions.json").write_text(json.dumps(sessions))
    (log.directory / "checkpoint-50").mkdir()
    (log.directory / "checkpoint-50" / "manifest.json").write_text("{}")
    (run,) = news_of(log.directory)
    assert (run["state"], run["text"][:5]) == ("error", "ended")
    told = {(event["what"], event["step"]) for event in run["events"]}
    assert told == {("start", 0), ("resume", 50), ("error", None), ("save", 50)}
    (point,) = run["log"]["items"]
    assert point == {"step": 3, "timestamp": point["timestamp"], "loss": None, "memory": [5, 7]}
    for outcome, state, event in (
        ("done", "done", "end"),
        ("stopped by SIGTERM", "stopped", "stop"),
        ("error: it broke", "error", "error"),
    ):
        sessions[-1] |= {"ended": "2026-01-01T12:00:00+00:00", "last_step": 80, "outcome": outcome}
        (log.directory / "sessions.json").write_text(json.dumps(sessions))
        (run,) = news_of(log.directory)
        last = next(each for each in run["events"] if each["text"] == outcome)
        assert (run["state"], run["text"], last["what"], last["step"]) == (state, outcome, event, 80)
    (log.directory / "sessions.json").write_text("[")
    assert news_of(log.directory)[0]["state"] == "idle"


def test_a_log_elsewhere_is_found_by_the_settings(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs")
    log.begin()
    log.write(1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"logging_dir: {tmp_path / 'logs'}\nmax_steps: 9\n")
    (run,) = news_of(tmp_path / "run")
    assert (run["max_steps"], len(run["log"]["items"])) == (9, 1)


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("a/x", "b/x", "a/x")]
    assert Watcher(runs).names == ["a/x", "b/x"]
    assert Watcher(runs[:1]).names == ["x"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of one run with a log of 3 steps."""
    log = Log(tmp_path / "run")
    log.begin()
    for step in (1, 2, 3):
        log.write(step)
    with Server("127.0.0.1", 0, Watcher([str(log.directory)])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, Any]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_it_tells_only_what_is_new(server: Server) -> None:
    status, text, headers = ask(server, "/news?")
    (run,) = json.loads(text)["runs"]
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert [point["step"] for point in run["log"]["items"]] == [1, 2, 3]
    known = {"1.2_1.0": 2, "1.3_1.0": 3, "9.2_1.0": 0, "x": 0, "1.2": 2, "1." + "9" * 30: 0}
    for have, first in known.items():
        (run,) = json.loads(ask(server, f"/news?{have}")[1])["runs"]
        assert run["log"]["first"] == first, have


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd", "/news/",
        "/run/trainer_logs.json", "/news/../config.yaml", "http://evil.example/", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    status, text, _ = ask(server, path)
    assert (status, text) == (404, "There is only one page here: /\n")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:6007", 200), ("localhost:9000", 200), ("LOCALHOST", 200), ("[::1]:80", 200),
        ("10.1.2.3", 200), ("evil.example", 403), ("evil.example:6007", 403), ("", 403), ("[::1", 403),
        ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("2130706433", 403),
    ],
)  # fmt: skip
def test_a_name_that_another_site_leads_here_is_refused(server: Server, host: str, status: int) -> None:
    for path in ("/", "/news?"):
        answer, text, _ = ask(server, path, host)
        assert answer == status
        assert status == 200 or text == "This page is not served under that name.\n"


def test_the_page_may_ask_nobody_else(server: Server) -> None:
    status, text, headers = ask(server, "/")
    assert status == 200
    assert re.findall(r"(?:https?:)?//[a-z]", re.sub(r"//[^\n]*\n", "\n", text)) == []
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "/", method="HEAD")[:2] == (200, "")
    assert ask(server, "/news?", method="POST")[0] == 501


def test_a_file_and_wrong_ports_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, message in (
            ([str(path)], f"runs='{path}' is a file"),
            (["--port", "70000"], "port=70000 must be from 0 to 65535"),
            (["--port", str(port)], f"port={port} cannot be listened on at 127.0.0.1 (Address already in"),
            (["--host", "no such host"], "host='no such host' is not an address"),
        ):
            assert main(["watch", *words]) == 2
            assert message in capsys.readouterr().err


COMMAND = [sys.executable, "-u", "-m", "llama_pretrain"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


class Watching:
    """The command, as a user starts it."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "watch", *words, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.told = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.told)
        assert found, self.process.communicate()[1]
        self.url = found[0]

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def interrupt(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    with Watching(str(tmp_path / "a"), str(tmp_path / "b")) as watching:
        assert watching.told == f"watching 2 runs at {watching.url} (Ctrl-C ends)\n"
        assert watching.interrupt() == (0, "", "")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    script = """
import sys
from llama_pretrain.cli import main
from llama_pretrain.commands.watch import Watcher
try:
    main(["watch", "--help"])
except SystemExit:
    pass
Watcher([sys.argv[1]]).news([])
assert "torch" not in sys.modules
"""
    (tmp_path / ".lease-1").write_text("{}")
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Skip without a browser; with PERF_METRICS_NEED_SERVERS=1, which CI sets, fail."""
    path = find_chromium()
    if path is None:
        text = "not on the path: chromium (Debian: apt-get install chromium)"
        if os.environ.get("PERF_METRICS_NEED_SERVERS") == "1":
            pytest.fail(f"PERF_METRICS_NEED_SERVERS=1, but {text}")
        pytest.skip(text)
    with Browser(path, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, write_inputs: Callable[[Path], Path]) -> Path:
    return write_inputs(tmp_path_factory.mktemp("work"))


def words_of(work: Path, name: str, max_steps: int, *more: str) -> list[str]:
    settings = {
        "model": work / "shape",
        "data": work / "data",
        "output-dir": work / name,
        "sequence-length": 32,
        "max-steps": max_steps,
        "logging-steps": 2,
        "held-out": 0.2,
        "eval-steps": 10,
        "save-steps": 10,
        "sample-tokens": 8,
        "lr-scheduler-type": "constant_with_warmup",
        "warmup-steps": 5,
    }
    return ["train", *(word for key, value in settings.items() for word in (f"--{key}", str(value))), *more]


COLOURED = """
[...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = { "0,114,178": 0, "213,94,0": 0 };
  for (let i = 0; i < data.length; i += 4) {
    const key = data.slice(i, i + 3).join();
    if (data[i + 3] > 200 && key in seen) seen[key] += 1;
  }
  return Object.values(seen);
})
"""
"""Pixels of the first run's colour and of the second's, by chart."""


STEP = "Number((document.querySelector('#runs dd')?.innerText ?? '0').split('/')[0].replace(',', ''))"
"""The step of the first run, as its card has it."""


def shown_step(page: Page) -> int:
    return int(page.evaluate(STEP))


def test_the_page_follows_a_run_while_it_trains_and_compares_two(
    work: Path, browser: Browser, tmp_path: Path
) -> None:
    pictures = Path(os.environ.get("WATCH_PICTURES", tmp_path))
    with Watching(str(work / "one"), str(work / "two")) as watching:
        page = browser.open(watching.url)
        page.wait("document.querySelectorAll('#runs article').length == 2")
        assert page.text().count("does not exist yet") == 2
        command = [*COMMAND, *words_of(work, "one", 4000)]
        one = subprocess.Popen(command, env=ONE_THREAD, stdout=subprocess.DEVNULL)
        try:
            page.wait("document.querySelector('#runs p').className == 'running'", 240)
            page.wait(f"{STEP} >= 20", 240)
            before, points = shown_step(page), page.evaluate(COLOURED)
            assert points[0][0] > 50
            assert points[0][1] == 0
            page.wait(f"{STEP} > {before + 10}", 240)
            page.picture(pictures / "watch-live-1280.png", whole=True)
            one.send_signal(signal.SIGINT)
            assert one.wait(240) == 75
        finally:
            one.kill()
            one.wait()
        page.wait("document.querySelector('#runs p').innerText == 'stopped by SIGINT'")
        assert main(words_of(work, "two", 30, "--seed", "2")) == 0
        page.wait("document.querySelectorAll('#runs p')[1].innerText == 'done'")
        loss, rate, norm, speed, *_ = page.evaluate(COLOURED)
        assert all(min(each) > 5 for each in (loss, rate, norm, speed)), (loss, rate, norm, speed)
        rows = "[...document.querySelectorAll('#events tr')].map((row) => row.cells[3].innerText)"
        assert {"start", "save", "evaluation", "stop", "end"} <= set(page.evaluate(rows))
        # Values at the pointer, of both runs.
        x, y = page.evaluate(
            "(() => { const box = document.querySelector('canvas').getBoundingClientRect();"
            " return [box.x + 70, box.y + 80]; })()"
        )
        page.move(x, y)
        page.wait("!document.getElementById('hover').hidden")
        told = page.evaluate("document.getElementById('hover').innerText")
        assert "one, training, step" in told
        assert "two, training, step" in told
        page.picture(pictures / "watch-two-1280.png")
        # The curve of a run whose box is not ticked goes.
        page.evaluate("document.querySelector('#runs input').click()")
        page.wait(f"{COLOURED.strip()}[1][0] == 0")
        page.evaluate("document.querySelector('#runs input').click()")
        narrow = browser.open(watching.url, 400, 800)
        narrow.wait("document.querySelectorAll('#events tr').length > 4")
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
        narrow.picture(pictures / "watch-two-400.png", whole=True)
        dark = browser.open(watching.url, dark=True)
        dark.wait("document.querySelectorAll('#events tr').length > 4")
        dark.picture(pictures / "watch-two-dark.png", whole=True)
        for each in (page, narrow, dark):
            assert each.complaints == []
            assert {url.split("?")[0] for url in each.requests} <= {watching.url, f"{watching.url}news"}
        assert watching.interrupt()[0] == 0
        dark.wait("document.getElementById('live').className == 'bad'")


def test_a_resume_that_goes_back_and_hostile_texts(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><img src=http://127.0.0.1:9/x.png onerror=alert(1)>&<b>"
    log = Log(tmp_path / hostile.replace("/", ""))
    log.begin()
    for step in range(1, 41):
        log.write(step, loss=4.0 - step / 20, eval_loss=None)
    samples = [{"step": step, "prompt": hostile, "text": f"{hostile} {step}"} for step in (10, 20)]
    (log.directory / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    with Watching(str(log.directory)) as watching:
        page = browser.open(watching.url)
        page.wait("document.querySelector('#runs dd')?.innerText == '40'")
        assert f"{hostile}{hostile} 20" in page.evaluate("document.querySelector('#samples').innerText")
        page.evaluate(
            "(() => { const choice = document.querySelector('#samples select'); choice.value = 10;"
            " choice.dispatchEvent(new Event('change')); })()"
        )
        assert f"{hostile}{hostile} 10" in page.evaluate("document.querySelector('#samples').innerText")
        log.begin(10)
        log.write(11, loss=9.0)
        page.wait("document.querySelector('#runs dd').innerText == '11'")
        assert page.evaluate("document.querySelectorAll('#runs dd')[1].innerText") == "9"
        for name, change in (
            ("axis", "value = 'hours'"),
            ("smooth", "value = 0.9"),
            ("log", "checked = true"),
        ):
            element = f"document.getElementById('{name}')"
            page.evaluate(f"{element}.{change}, {element}.dispatchEvent(new Event('input'))")
        shutil.rmtree(log.directory)
        page.wait("document.querySelector('#runs p').innerText == 'does not exist yet, or was removed'")
        assert page.complaints == []
        assert not any("x.png" in url for url in page.requests)
