"""`tokenize --ray` on a real Ray of this machine with two workers; run with the extra `ray`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from dataloader_dispatch.cli import main
from dataloader_dispatch.cli.parts import ByteEncoder

OPTIONS = ["--tokenizer", "bytes", "--part-size", "20KB"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """The address of a cluster, of which no process stays."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    others = below(os.getpid())  # such as servers of other tests
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets must have short paths
    context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    started = below(os.getpid())
    yield context.address_info["address"]
    started = (started | below(os.getpid())) - others
    ray.shutdown()
    until = time.monotonic() + 30
    while alive := {process for process in started if is_alive(process)}:
        assert time.monotonic() < until, alive
        time.sleep(0.05)
    shutil.rmtree(folder)


def below(process: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    found: set[int] = set()
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, tasks.read_text().split()):
                found |= {child} | below(child)
    return found


def is_alive(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    chance = random.Random(0)
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": "wörd " * chance.randrange(12)}) + "\n" for _ in range(3000)))
    return path


@pytest.fixture
def whole(corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """What one process writes."""
    assert main(["tokenize", str(corpus), str(tmp_path / "whole"), *OPTIONS, "--workers", "0"]) == 0
    return content(tmp_path / "whole")


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_cluster_writes_what_one_process_does(
    cluster: str, corpus: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    words = ["tokenize", corpus.name, "out", *OPTIONS, "--ray", cluster]
    done = subprocess.run(
        [sys.executable, "-m", "dataloader_dispatch", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3000 of 3000 documents" in done.stderr
    assert len(whole) > 6
    assert content(tmp_path / "out") == whole


class Dying(ByteEncoder):
    """Kills its process, once."""

    def __init__(self, mark: Path, how: str) -> None:
        self._mark, self._how = mark, how

    def encode(self, texts):  # type: ignore[no-untyped-def]
        try:
            self._mark.open("x").close()
        except FileExistsError:
            return super().encode(texts)
        if self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("how", ["killed", pytest.param("full", marks=pytest.mark.full)])
def test_a_task_that_dies_is_run_again(
    corpus: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    dying = Dying(tmp_path / "died", how)
    monkeypatch.setattr("dataloader_dispatch.cli.tokenize.load_encoder", lambda name: dying)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    assert main(["tokenize", str(corpus), str(tmp_path / "out"), *OPTIONS, "--ray", "auto"]) == 0
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert (tmp_path / "died").exists()
    assert content(tmp_path / "out") == whole


def test_what_is_wrong_is_said_and_what_is_made_is_kept(
    corpus: Path, whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, status = corpus.read_bytes(), corpus.stat()
    corpus.write_bytes(good[:-2] + b"!\n")
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))
    words = ["tokenize", str(corpus), str(tmp_path / "out"), *OPTIONS, "--ray", "auto"]
    assert main(words) == 2
    assert "corpus.jsonl:3000: not valid JSON" in (said := capsys.readouterr().err)
    assert "Traceback" not in said
    corpus.write_bytes(good)
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(words) == 0
    assert "going on: " in capsys.readouterr().err
    assert content(tmp_path / "out") == whole


def test_what_is_left_out_is_counted_and_said(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = corpus.read_text().splitlines()
    lines[2000] = "{broken"
    corpus.write_text("\n".join(lines))
    options = [*OPTIONS, "--unreadable", "skip"]
    assert main(["tokenize", str(corpus), str(tmp_path / "out"), *options, "--ray", "auto"]) == 0
    said = capsys.readouterr()
    assert said.err.count("warning: left out a document") == 1
    assert "0 files and 1 documents that cannot be read" in said.out
    assert main(["tokenize", str(corpus), str(tmp_path / "whole"), *options, "--workers", "0"]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_the_driver_is_killed_and_run_again(
    cluster: str, corpus: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["tokenize", str(corpus), str(out), *OPTIONS, "--ray", cluster]

    def run() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dataloader_dispatch", *words], stderr=subprocess.PIPE, text=True
        )

    first = run()
    until = time.monotonic() + 60
    while not list(out.glob(".unfinished/part-*")) and not (out / "manifest.json").exists():
        assert time.monotonic() < until
        time.sleep(0.002)
    first.kill()
    first.communicate()
    second = run()
    said = second.communicate(timeout=60)[1]
    assert second.returncode == 0, said
    assert content(out) == whole


def test_no_cluster_and_two_ways_at_once(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tokenize", str(corpus), str(tmp_path / "out"), *OPTIONS]
    assert main([*words, "--ray", "auto", "--task", "0/2"]) == 2
    assert "two ways to divide the work" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "dataloader_dispatch", *words, "--ray", "nonsense"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "--ray nonsense: the cluster cannot be used" in done.stderr
