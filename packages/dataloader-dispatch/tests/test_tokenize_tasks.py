"""`tokenize --task`: what several machines write together is what one writes, whatever happens to a task."""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_start import WarmStart

from dataloader_dispatch import DataError, TokenBinary
from dataloader_dispatch.cli import main
from dataloader_dispatch.cli.output import Output
from dataloader_dispatch.cli.tasks import Task, parse_task

OPTIONS = ["--tokenizer", "bytes", "--part-size", "20KB", "--workers", "0"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    chance = random.Random(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(2):
        lines = [json.dumps({"text": "wörd " * chance.randrange(12)}) for _ in range(1500)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Callable[..., int]:
    def run(task: str, *options: str, out: str = "out") -> int:
        words = ["tokenize", str(corpus), str(tmp_path / out), *OPTIONS, *options]
        return main([*words, "--task", task] if task else words)

    return run


@pytest.fixture
def whole(run: Callable[..., int], tmp_path: Path) -> dict[str, bytes]:
    """What one machine writes."""
    assert run("", out="whole") == 0
    found = content(tmp_path / "whole")
    assert len(found) > 10
    return found


def test_tasks_in_any_order_write_what_one_machine_does(
    run: Callable[..., int], whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, order in enumerate([["0/1"], *itertools.permutations(["0/3", "1/3", "2/3"])]):
        out = tmp_path / f"out{number}"
        for task in order[:-1]:
            assert run(task, out=out.name) == 0
            assert not (out / "manifest.json").exists()
        capsys.readouterr()
        assert run(order[-1], out=out.name) == 0
        assert "parts are missing" not in capsys.readouterr().err
        assert content(out) == whole
    assert run("1/3", out="out0") == 0
    assert "is finished already" in capsys.readouterr().err


def test_more_tasks_than_parts(
    run: Callable[..., int], whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("99/100") == 0
    assert "task 99/100 has no part, as the input makes fewer" in capsys.readouterr().err
    for index in range(len(whole) // 2):
        assert run(f"{index}/100") == 0
    assert content(tmp_path / "out") == whole


def test_what_is_missing_is_named_and_made_without_tasks(
    run: Callable[..., int], whole: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = len(whole) // 2
    assert run("2/5") == 0
    said = capsys.readouterr().err
    assert re.search(rf"task 2/5 is done. \d+ of {parts} parts are missing, of tasks 0-1, 3-4 of 5", said)
    for task in ("0/5", "1/5", "4/5"):
        assert run(task) == 0
    assert "parts are missing, of task 3/5. The last task to end finishes" in capsys.readouterr().err
    with pytest.raises(DataError, match="is not finished: it holds parts and no manifest"):
        TokenBinary(tmp_path / "out")
    assert run("") == 0
    assert "going on: " in capsys.readouterr().err
    assert content(tmp_path / "out") == whole


def test_other_settings_and_changed_input_are_refused(
    run: Callable[..., int],
    corpus: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("0/2") == 0
    capsys.readouterr()
    assert run("1/2", "--undecodable", "skip") == 2
    assert "begun otherwise: undecodable was 'error' and is 'skip'" in capsys.readouterr().err
    assert run("1/2", "--overwrite") == 2
    assert "--overwrite would let each --task remove what the others made" in capsys.readouterr().err
    changed = corpus / "1.jsonl"
    status = changed.stat()
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert run("1/2") == 2
    assert "input 1.jsonl was changed in the meantime" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run("1/2") == 0
    assert content(tmp_path / "out") == whole


def test_of_two_that_begin_at_once_otherwise_one_is_refused(
    run: Callable[..., int],
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _while(Output, "begin", lambda: run("0/2"), monkeypatch)
    assert run("1/2", "--part-size", "30KB") == 2
    assert "is writing" in (said := capsys.readouterr().err)
    assert "otherwise: part_size was 20000 and is 30000" in said
    assert run("1/2") == 0
    assert content(tmp_path / "out") == whole


def _while(owner: Any, name: str, other: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another task run, from its beginning to its end, just before a method does its work."""
    method = getattr(owner, name)

    def first_other(*values: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        assert other() == 0
        return method(*values, **named)

    monkeypatch.setattr(owner, name, first_other)


@pytest.mark.parametrize("moment", ["begin", "finished_parts", "record", "recorded", "finish"])
def test_another_finishes_everything_in_the_middle_of_a_task(
    run: Callable[..., int],
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    for task in ("1/3", "2/3"):
        assert run(task) == 0
    _while(Output, moment, lambda: run("0/3"), monkeypatch)
    assert run("0/3") == 0
    assert content(tmp_path / "out") == whole
    TokenBinary(tmp_path / "out").verify()


def test_all_at_once_twice_with_kills(
    corpus: Path, whole: dict[str, bytes], tmp_path: Path, warm: WarmStart
) -> None:
    words = ["-m", "dataloader_dispatch", "tokenize", str(corpus), str(tmp_path / "out"), *OPTIONS]
    chance = random.Random(1)

    def start(task: str, name: str) -> Any:
        return warm.start([*words, "--task", task], os.environ, tmp_path / "stdout", tmp_path / name)

    for _ in range(3):
        killed = [start(f"{index}/3", "killed") for index in range(3)]
        records = len(list((tmp_path / "out" / ".unfinished").glob("part-*.json")))
        until = time.monotonic() + 60
        while len(list((tmp_path / "out" / ".unfinished").glob("part-*"))) <= records + 1:
            if (tmp_path / "out" / "manifest.json").exists():
                break
            assert time.monotonic() < until
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        for process in killed:
            process.kill()
            process.wait(60)
    tasks = [f"{index}/3" for index in range(3)] * 2
    running = [start(task, f"stderr{number}") for number, task in enumerate(tasks)]
    codes = [process.wait(120) for process in running]
    assert codes == [0] * 6, [(tmp_path / f"stderr{number}").read_text() for number in range(6)]
    assert content(tmp_path / "out") == whole


def test_the_elements_of_a_job_array(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(index: int, first: int, last: int, count: int) -> Task:
        for name, value in (("ID", index), ("MIN", first), ("MAX", last), ("COUNT", count)):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        return parse_task("slurm")

    assert task(0, 0, 63, 64) == Task(0, 64)
    assert task(64, 1, 64, 64) == Task(63, 64)
    assert task(5, 1, 7, 4) == Task(2, 4)  # 1-7:2
    assert task(9, 9, 9, 1) == Task(0, 1)
    assert task(7, 3, 7, 2) == Task(1, 2)  # 3,7
    for index, first, last, count in ((3, 0, 10, 4), (2, 1, 5, 3)):  # 0,3,4,10 and 1,2,5
        with pytest.raises(argparse.ArgumentTypeError, match="leave gaps"):
            task(index, first, last, count)
    with pytest.raises(argparse.ArgumentTypeError, match="4 from 0 to 10, leave gaps"):
        task(10, 0, 10, 4)
    monkeypatch.delenv("SLURM_ARRAY_TASK_COUNT")
    with pytest.raises(argparse.ArgumentTypeError, match="slurm needs SLURM_ARRAY_TASK_COUNT"):
        parse_task("slurm")


def test_tasks_that_are_none(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for text, told in (
        ("64/64", "64 tasks are 0/64 to 63/64"),
        ("1", "Write INDEX/COUNT"),
        ("0/0", "Write INDEX/COUNT"),
        ("-1/2", "expected one argument"),
    ):
        with pytest.raises(SystemExit):
            run(text)
        assert told in " ".join(capsys.readouterr().err.split())


def test_a_file_system_without_hard_links_is_said(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def link(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", link)
    assert run("0/2") == 2
    assert "has no hard links, by which tasks agree on the plan" in capsys.readouterr().err


def test_without_ray_its_extra_is_named(corpus: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from dataloader_dispatch.cli import main; sys.exit(main())"
    words = ["tokenize", str(corpus), str(tmp_path / "out"), *OPTIONS, "--ray", "local"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'dataloader-dispatch[ray]'" in done.stderr
