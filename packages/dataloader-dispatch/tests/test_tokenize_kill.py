"""`tokenize` is killed, as a whole or a worker of it, and interrupted; it says so, and continues."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from warm_start import WarmProcess, WarmStart

from dataloader_dispatch import open_documents
from dataloader_dispatch.cli import main

DOCUMENTS = 150_000
WORKERS = Path(__file__).parent / "workers"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKERS)}


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def write_corpus(path: Path, documents: int) -> Path:
    chance = random.Random(0)
    with path.open("w") as stream:
        for _ in range(documents):
            stream.write(json.dumps({"text": "word " * chance.randrange(12)}) + "\n")
    return path


@pytest.mark.full
def test_killed_again_and_again(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", 40_000)
    done = subprocess.run(
        [sys.executable, str(WORKERS / "tokenize_kills.py"), str(corpus), str(tmp_path / "out"), "3"],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["failures"] == []
    # The kills must have hit the writing of parts, or nothing was tested.
    assert len(set(result["finished"])) >= 4
    assert result["finished"] == sorted(result["finished"])
    options = ["--tokenizer", "bytes", "--part-size", "20KB", "--workers", "0"]
    assert main(["tokenize", str(corpus), str(tmp_path / "whole"), *options]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_ended_before_the_manifest_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl", 50)
    options = ["--tokenizer", "bytes", "--workers", "0"]
    rename = Path.replace

    def end(path: Path, target: Path) -> Path:
        if target.name == "manifest.json":
            os._exit(7)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", end)
    process = os.fork()
    if process == 0:
        os._exit(main(["tokenize", str(corpus), str(tmp_path / "out"), *options]))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    monkeypatch.undo()
    for name in ("out", "whole"):
        assert main(["tokenize", str(corpus), str(tmp_path / name), *options]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


class Command(NamedTuple):
    """The command in a process of its own."""

    process: WarmProcess
    stderr: Path

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on standard error, once it has ended."""
        return self.process.wait(60), self.stderr.read_text()


@pytest.fixture
def run(tmp_path: Path, warm: WarmStart) -> Callable[[int], Command]:
    """Start the command; the argument is the number of workers."""
    corpus = write_corpus(tmp_path / "a.jsonl", DOCUMENTS)

    def start(workers: int) -> Command:
        options = ["--tokenizer", "bytes", "--part-size", "150KB", "--workers", str(workers)]
        words = ["-m", "dataloader_dispatch", "tokenize", str(corpus), str(tmp_path / "out"), *options]
        said = tmp_path / "stderr"
        return Command(warm.start(words, ENVIRONMENT, tmp_path / "stdout", said), said)

    return start


def writing(out: Path, finished: int, workers: int) -> list[int]:
    """Process ids of the workers, as soon as some more parts are finished; each is writing a file then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        names = [path.name for path in (out / ".unfinished").glob("part-*")] if out.exists() else []
        pids = {int(name.split("-")[2].removesuffix(".bin")) for name in names if name.endswith(".bin")}
        alive = sorted(pid for pid in pids if is_alive(pid))
        if sum(name.endswith(".json") for name in names) >= finished and len(alive) == workers:
            return alive
        time.sleep(0.001)
    raise AssertionError(f"no {workers} workers are writing {out}")


# Workers of any loader that are still starting are killed in test_worker_ends.py.
@pytest.mark.full
def test_workers_that_are_still_starting_die_with_the_command(run: Callable[[int], Command]) -> None:
    process = run(2).process
    while len(workers := children(process.pid)) < 2:
        assert process.returncode is None
        time.sleep(0.001)
    process.kill()
    process.wait(60)
    wait_for_the_end_of(workers)


def children(process: int) -> list[int]:
    """Process ids of workers."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def wait_for_the_end_of(processes: list[int]) -> None:
    """Wait the two seconds that are promised, and what a busy machine may add."""
    deadline = time.monotonic() + 2 + 8
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, processes))


def is_alive(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_kills_and_ctrl_c_with_workers(run: Callable[[int], Command], tmp_path: Path) -> None:
    out = tmp_path / "out"
    # A worker is killed: the command says which, and ends.
    command = run(2)
    workers = writing(out, 3, 2)
    os.kill(workers[1], signal.SIGKILL)
    code, said = command.end()
    assert code == 1, said
    assert f"(process {workers[1]}) was killed by SIGKILL while it made part-000" in said
    assert "Run the same command again to continue" in said
    assert "Traceback" not in said
    assert not any(map(is_alive, workers))
    done = len(list((out / ".unfinished").glob("part-*.json")))
    assert done >= 3

    # The command itself is killed: its workers do not write on.
    command = run(1)
    workers = writing(out, done + 2, 1)
    command.process.kill()
    command.end()
    wait_for_the_end_of(workers)
    done = len(list((out / ".unfinished").glob("part-*.json")))

    # Ctrl-C reaches all processes of a terminal.
    command = run(1)
    workers = writing(out, done + 2, 1)
    for process in (command.process.pid, *workers):
        os.kill(process, signal.SIGINT)
    code, said = command.end()
    assert code == 130, said
    assert "interrupted. Run the same command again to continue" in said
    assert "Traceback" not in said
    assert not any(map(is_alive, workers))
    assert not (out / "manifest.json").exists()

    options = ["--tokenizer", "bytes", "--part-size", "150KB", "--workers", "0"]
    for directory in (out, tmp_path / "whole"):
        assert main(["tokenize", str(tmp_path / "a.jsonl"), str(directory), *options]) == 0
    assert content(out) == content(tmp_path / "whole")
    assert len(open_documents(out)) == DOCUMENTS
