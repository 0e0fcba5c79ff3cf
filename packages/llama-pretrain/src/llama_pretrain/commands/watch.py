"""The command `watch`: a page, served on this machine, that shows runs while they train.

The page asks each second what is new, and nobody reads a run while nobody asks. Of a log only what was
appended is read, and only what the page does not have yet is sent. A request can name no file: it says how
much of each run the page has.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import stat
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any, BinaryIO, TypeAlias
from urllib.parse import urlsplit

import yaml

from checkpoint_core import find_lease_holder
from dist_env import split_address
from trainer_core import ConfigurationError

from ..console import CONFIG_NAME, LOGS_NAME, SESSIONS_NAME
from .arguments import WatchArguments

Values: TypeAlias = dict[str, object]

SAMPLES_NAME = "samples.jsonl"
"""What `trainer_core.TextSamples` writes beside the log."""
_MOST_BYTES = 2**24
"""Read of one file at once; the rest follows with the next question."""
_TAIL_BYTES = 64
_NO_OBJECT = (b"", b"[", b"]", b"[]")
_LEAST_SECONDS = 0.5
"""Between two looks at the runs, however many pages ask."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
_HAVE = re.compile(r"(\d{1,9})\.(\d{1,9})")
_FIGURES = ("loss", "learning_rate", "grad_norm", "tok_per_sec", "mfu", "hfu", "ofu")
"""Entries of a log record that are drawn, beside losses of evaluations and memory."""
_PLACES = ("timestamp", "total_tokens", "train_runtime")


def watch(args: WatchArguments) -> int:
    """Serve the page until Ctrl-C.

    Args:
        args: Which runs, and where to listen.

    Returns:
        The exit code, 0.

    Raises:
        ConfigurationError: If it cannot listen there.
    """
    # Around all of it: who reads the address may press Ctrl-C before the first request is waited for.
    with suppress(KeyboardInterrupt), _listen(args) as server:
        print(f"watching {_told(server.watcher.names)} at {server.url} (Ctrl-C ends)", flush=True)
        if not server.is_loopback:
            print("Whoever reaches this machine can read the page.", file=sys.stderr, flush=True)
        if args.open:
            # Some browsers return only when they are closed.
            threading.Thread(target=_open, args=(server.url,), daemon=True).start()
        server.serve_forever()
    return 0


def _told(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} runs"


def _open(url: str) -> None:
    if not webbrowser.open(url):
        print(f"no browser was found here; open {url} yourself", file=sys.stderr, flush=True)


def _listen(args: WatchArguments) -> Server:
    try:
        return Server(args.host, args.port, Watcher(args.runs))
    except socket.gaierror as error:
        raise ConfigurationError(
            "host", args.host, "is not an address or a name of this machine", "leave it out for 127.0.0.1"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            "port",
            args.port,
            f"cannot be listened on at {args.host} ({error.strerror or error})",
            "choose another port, or --port 0 for a free one",
        ) from error


class JsonLines:
    """The JSON objects of a file with one on each line, read as they are appended.

    It reads JSON lines, and the array that `perf_metrics.JsonLogger` writes, whose end moves with each entry.
    A line that is still being written is left for the next time. A file that does not continue what was read
    begins a new generation: a run that resumes rewrites its log, a new run replaces it, and it may be gone.

    Args:
        keep: Makes of an object what is kept; None: nothing of it is.
    """

    def __init__(self, keep: Callable[[Values], Values | None]) -> None:
        self.generation = 1
        self.items: list[Values] = []
        self._keep = keep
        self._end = 0
        """Where the last object that was read ends; what follows it may still change."""
        self._tail = b""
        self._seen: tuple[int, ...] = ()

    def refresh(self, path: Path) -> None:
        """Read what is new."""
        try:
            with _open_file(path) as file:
                seen = _version(os.fstat(file.fileno()))
                if seen == self._seen:
                    return
                file.seek(max(0, self._end - len(self._tail)))
                if file.read(len(self._tail)) != self._tail:
                    self._forget()
                    file.seek(0)
                is_all = self._take(file.read(_MOST_BYTES))
        except OSError:  # it is not there, not yet, or must not be read
            if self.items or self._end:
                self._forget()
            self._seen = ()
            return
        self._seen = seen if is_all else ()

    def since(self, generation: int, count: int) -> Values:
        """What somebody lacks who has so many items of a generation."""
        first = count if generation == self.generation and count <= len(self.items) else 0
        return {"generation": self.generation, "first": first, "items": self.items[first:]}

    def _take(self, data: bytes) -> bool:
        """Keep the objects on complete lines; says whether the data was all there is."""
        start = self._end
        position = 0
        for line in data.splitlines(keepends=True):
            position += len(line)
            content = line.strip().strip(b",").strip()
            if not line.endswith(b"\n") or content in _NO_OBJECT:
                continue
            # A line that cannot be read is damaged, or being written: it is passed with the next good one.
            if (found := _object(content)) is not None:
                self._end = start + position - len(line) + len(line.rstrip())
                self._end -= line.rstrip().endswith(b",")
                self._tail = data[: self._end - start][-_TAIL_BYTES:]
                if (kept := self._keep(found)) is not None:
                    self.items.append(kept)
        is_all = len(data) < _MOST_BYTES
        if not is_all and self._end == start:  # not one object in so much: this is not a log
            self._end, self._tail = start + len(data), data[-_TAIL_BYTES:]
        return is_all

    def _forget(self) -> None:
        self.generation += 1
        self.items, self._end, self._tail = [], 0, b""


class _Document:
    """A small file that is read again when it has changed; empty while it cannot be read."""

    def __init__(self, parse: Callable[[bytes], object]) -> None:
        self._parse = parse
        self._seen: tuple[int, ...] = ()
        self._value: object = None

    def read(self, path: Path) -> object:
        """Return its content."""
        try:
            with _open_file(path) as file:
                seen = _version(os.fstat(file.fileno()))
                if seen != self._seen:
                    self._value, self._seen = self._parse(file.read(_MOST_BYTES)), seen
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            self._value, self._seen = None, ()
        return self._value


def _open_file(path: Path) -> BinaryIO:
    """Open a regular file; the name may be that of a pipe, which would wait for its writer."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(f"{path} is not a file")
    return file


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _object(line: bytes) -> Values | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: object) -> float | None:
    """A finite number, shortened to what a picture can show; a whole one as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _point(entry: Values) -> Values | None:
    """What the page needs of a log record."""
    step = _number(entry.get("global_step", entry.get("step")))
    if step is None:
        return None
    point: Values = {
        key: _number(value)
        for key, value in entry.items()
        if key in (*_FIGURES, *_PLACES) or (key.startswith("eval_") and key.endswith("loss"))
    }
    if isinstance(when := entry.get("timestamp"), float):
        point["timestamp"] = round(when, 2)
    memory = entry.get("peak_mem_allocated", entry.get("peak_mem"))
    if memory is not None:
        point["memory"] = [_number(each) for each in (memory if isinstance(memory, list) else [memory])]
    return {"step": step, **point}


def _sample(entry: Values) -> Values:
    texts = {name: str(entry.get(name, "")) for name in ("prompt", "text")}
    return {"step": _number(entry.get("step")), **texts}


class _Run:
    """A run, as its files tell it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._log, self._samples = JsonLines(_point), JsonLines(_sample)
        self._config = _Document(yaml.safe_load)
        self._history = _Document(json.loads)
        self._saves: dict[int, float] = {}
        self._facts: Values = {}

    def refresh(self) -> None:
        """Read what is new."""
        config = self._config.read(self._path / CONFIG_NAME)
        settings = config if isinstance(config, dict) else {}
        apart = settings.get("logging_dir")
        # Beside checkpoints in a store this is the directory of the logs.
        in_store = split_address(str(settings.get("output_dir"))) is not None
        place = Path(str(apart)) if apart and not in_store else self._path
        generation = self._log.generation
        self._log.refresh(place / LOGS_NAME)
        self._samples.refresh(place / SAMPLES_NAME)
        if self._log.generation != generation:
            self._saves.clear()  # those that were rotated away may be of another run
        self._saves |= _checkpoints(self._path)
        history = self._history.read(self._path / SESSIONS_NAME)
        sessions = [each for each in history if isinstance(each, dict)] if isinstance(history, list) else []
        kind, text = self._state(sessions)
        self._facts = {
            "name": self.name,
            "path": str(self._path),
            "state": kind,
            "text": text,
            "max_steps": _number(settings.get("max_steps")),
            "events": sorted(self._events(sessions, kind), key=lambda event: event["time"] or 0),
        }

    def news(self, log: tuple[int, int], samples: tuple[int, int]) -> Values:
        """What somebody lacks who has so many records and samples, each as generation and count."""
        return {**self._facts, "log": self._log.since(*log), "samples": self._samples.since(*samples)}

    def _state(self, sessions: Sequence[Values]) -> tuple[str, str]:
        """Whether it runs, in one word for the page and in a sentence."""
        holder = None
        with suppress(OSError):
            holder = find_lease_holder(self._path)
        last = sessions[-1] if sessions else {}
        if holder is not None:
            return "running", holder.describe()
        if isinstance(outcome := last.get("outcome"), str):
            return _kind_of(outcome), outcome
        if "first_step" in last:
            return "error", _KILLED
        if self._log.items:
            is_over = "train_runtime" in self._log.items[-1]
            return ("done", "done") if is_over else ("idle", "not running")
        if self._path.is_dir():
            return "waiting", "has logged nothing yet"
        return "waiting", "does not exist yet, or was removed"

    def _events(self, sessions: Sequence[Values], state: str) -> Iterator[dict[str, Any]]:
        for step, when in self._saves.items():
            yield {"time": when, "step": step, "what": "save", "text": f"checkpoint-{step}"}
        for number, session in enumerate(sessions, start=1):
            first, outcome = _number(session.get("first_step")), session.get("outcome")
            begun, ended = _time(session.get("started")), _time(session.get("ended"))
            on = ", ".join(str(session[name]) for name in ("mesh", "device", "host") if session.get(name))
            what = "resume" if number > 1 or first else "start"
            yield {"time": begun, "step": first, "what": what, "text": on}
            if isinstance(outcome, str):
                what, last = _EVENTS[_kind_of(outcome)], _number(session.get("last_step"))
                yield {"time": ended, "step": last, "what": what, "text": outcome}
            elif first is not None and (number < len(sessions) or state == "error"):
                after = _time(sessions[number].get("started")) if number < len(sessions) else None
                yield {"time": after or self._last_time(), "step": None, "what": "error", "text": _KILLED}

    def _last_time(self) -> float | None:
        return _number(self._log.items[-1].get("timestamp")) if self._log.items else None


_KILLED = "ended without a word: it was killed, or its machine went down"
_EVENTS = {"done": "end", "stopped": "stop", "error": "error"}


def _kind_of(outcome: str) -> str:
    """The word for how a start of a run ended, as `RunDirectory.end_session` has written it."""
    if outcome == "done":
        return "done"
    return "error" if outcome.startswith("error") else "stopped"


def _checkpoints(directory: Path) -> dict[int, float]:
    """Steps of the checkpoints, and when they were written."""
    found: dict[int, float] = {}
    with suppress(OSError):
        for entry in os.scandir(directory):
            if match := _CHECKPOINT.fullmatch(entry.name):
                with suppress(OSError):  # it may be rotated away right now
                    found[int(match[1])] = (Path(entry.path) / "manifest.json").stat().st_mtime
    return found


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by the end of its path, as much of it as tells them apart."""
    longest = max(len(path.parts) for path in paths)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


class Watcher:
    """Some runs, read as often as somebody asks, but at most twice a second.

    Args:
        runs: Their output directories, which need not exist.

    Raises:
        ConfigurationError: If one is a file, or there is none.
    """

    def __init__(self, runs: Sequence[str]) -> None:
        paths = list(dict.fromkeys(Path(run).absolute() for run in runs))
        for path in paths:
            if path.is_file():
                raise ConfigurationError("runs", str(path), "is a file", "name the output directory of a run")
        self.names = _names(paths)
        self._runs = [_Run(name, path) for name, path in zip(self.names, paths, strict=True)]
        self._id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._looked = -math.inf

    def news(self, have: Sequence[tuple[int, int]]) -> Values:
        """What somebody lacks who has so many records and samples of each run, as generation and count."""
        with self._lock:
            if time.monotonic() - self._looked >= _LEAST_SECONDS:
                for run in self._runs:
                    run.refresh()
                self._looked = time.monotonic()
            known = [*have, *[(0, 0)] * (2 * len(self._runs) - len(have))]
            runs = [
                run.news(log, samples)
                for run, log, samples in zip(self._runs, known[::2], known[1::2], strict=False)
            ]
            return {"server": self._id, "runs": runs}


class Server(ThreadingHTTPServer):
    """Serves the page of a watcher.

    Args:
        host: Address to listen on.
        port: Port; 0: a free one.
        watcher: The runs.

    Raises:
        OSError: If it cannot listen there.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, watcher: Watcher) -> None:
        self.watcher = watcher
        self.page, self.policy = _page()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        address = str(self.server_address[0])
        self.is_loopback = ipaddress.ip_address(address).is_loopback
        name = socket.gethostname().lower()
        self._names = {"localhost", host.lower()} | (set() if self.is_loopback else {name})
        shown = name if ipaddress.ip_address(address).is_unspecified else address
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Bind, and do not ask a name server for this machine's name, as `HTTPServer` does, for nothing."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def is_own(self, host: str) -> bool:
        """Whether a request was meant for this server.

        A page of another site may lead a name of its own to this address, and then asks as that site. An
        address in the place of a name cannot be led elsewhere.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in self._names

    def handle_error(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """A page that was closed does not wait for its answer; anything else is printed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _page() -> tuple[bytes, str]:
    """The page, and what its policy lets it do: run its own script, and ask this server."""
    text = files("llama_pretrain.commands").joinpath("watch.html").read_text(encoding="utf-8")

    def hashed(element: str) -> str:
        content = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        digest = hashlib.sha256((content[1] if content else "").encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, or with what is new."""

    server: Server
    server_version, sys_version = "llama-pretrain", ""
    timeout = 10
    """Seconds in which a request has to come."""

    def do_GET(self) -> None:
        """Answer one question."""
        path, _, query = self.path.partition("?")
        if not self.server.is_own(self.headers.get("Host", "")):
            self._answer(403, "text/plain", b"This page is not served under that name.\n")
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif path == "/news":
            have = [(int(generation), int(count)) for generation, count in _HAVE.findall(query)]
            news = json.dumps(self.server.watcher.news(have), allow_nan=False, separators=(",", ":"))
            self._answer(200, "application/json", news.encode())
        else:
            self._answer(404, "text/plain", b"There is only one page here: /\n")

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each second is of no use."""
